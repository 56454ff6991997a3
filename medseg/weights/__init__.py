"""Trained weights: their files and model folders, and the included weights."""
