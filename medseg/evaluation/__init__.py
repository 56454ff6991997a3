"""Evaluation of a folder of predictions: matching with references, and the tables of scores."""
