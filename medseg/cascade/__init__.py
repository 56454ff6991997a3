"""Coarse and fine stage together on one scan: localise the regions, refine each, join them."""
