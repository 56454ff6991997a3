"""Reports: comparison of two results, HTML pages over runs and cases, viewer, plots."""
