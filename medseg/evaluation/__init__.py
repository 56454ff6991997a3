"""Matching predictions with references, scoring, tables."""
