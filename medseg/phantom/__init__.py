"""Synthetic scans with exact labels: a procedural chest CT, and scenes of organs for any task."""
