"""Trained weights: the file formats, and those that come with medseg."""
