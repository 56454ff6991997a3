"""Exact bytes of a training step, counted on the graph that autograd really builds, without computing it."""
