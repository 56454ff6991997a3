"""Scores of two masks, figures in HU of labels, and adapters to metrics of other libraries."""
