"""Synthetic scans with exact labels: a procedural chest CT, scenes of organs for any task, and data sets of both."""
