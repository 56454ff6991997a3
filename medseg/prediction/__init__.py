"""Prediction of whole scans, from files to files: search, batches, results; the Python API."""
