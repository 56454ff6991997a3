"""From image to probabilities and clean masks."""
