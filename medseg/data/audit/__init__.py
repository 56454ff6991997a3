"""Audit of scans and labels: pure functions from arrays, grids and the task to findings."""
