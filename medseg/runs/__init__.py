"""A run on disk and as processes: folder, status, locks, ranks, jobs of a sweep."""
