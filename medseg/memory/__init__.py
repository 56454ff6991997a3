"""Switches that save memory or time, applied to a network from outside."""
