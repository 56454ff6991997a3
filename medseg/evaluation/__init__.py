"""Evaluation of a folder of predictions: references matched and scored."""
