"""Trained weights: file formats, and the included weights."""
