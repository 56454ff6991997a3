"""Switches that save memory or time in any network, and the count of what a training step holds."""
