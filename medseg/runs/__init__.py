"""A run on disk and as processes: folder, status, locks, ranks, the order of its steps, sweeps."""
