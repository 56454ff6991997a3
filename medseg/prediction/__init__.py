"""From scans to result files: finding scans, batches, engines, and the Python API."""
