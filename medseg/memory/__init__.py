"""Switches that save memory or time in any network, and the memory count of a training step."""
