"""From scan files to label files: scans found, segmented in batches, written; the Python API."""
