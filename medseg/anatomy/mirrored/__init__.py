"""Mirrored images: signs in a CT that left and right are exchanged under its header."""
