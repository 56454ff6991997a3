"""Prediction: from scans to result files, in batches or from Python."""
