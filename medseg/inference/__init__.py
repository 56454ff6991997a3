"""Inference: from a normalised image to probabilities, and from labels to clean labels."""
