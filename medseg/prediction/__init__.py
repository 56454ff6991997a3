"""Prediction of whole scans: finding them, batches, engines, result files, and the Python API."""
