"""Builders: make objects from the configuration, one module per group."""
