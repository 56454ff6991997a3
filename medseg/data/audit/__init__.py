"""What may be wrong with a scan and its labels: pure functions from arrays, grids and the task to findings."""
