"""Pictures as PNG: overlays of cases, the audit of a data set, plots of measurements."""
