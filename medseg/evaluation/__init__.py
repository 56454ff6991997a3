"""Evaluation of a folder of predictions: references matched, scored, compared by patient."""
