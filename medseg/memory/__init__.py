"""Memory of one training step: the switches that save it, and the count of its bytes."""
