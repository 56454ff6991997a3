"""Experiments over experiments: ladder, spacing comparison, cross-validation, search, weights."""
