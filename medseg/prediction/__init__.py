"""From scans to files: finding cases, the batch pipeline, result files, the Python API."""
