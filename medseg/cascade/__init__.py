"""Cascade of two trained stages: localise the regions, refine each in its crop, join them."""
