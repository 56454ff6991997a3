"""Configuration to objects, one module per group."""
