"""Metrics of one pair of masks, figures in HU of labels, adapters to metrics of other libraries."""
