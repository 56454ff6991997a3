"""Reports: paired differences of two results, pages over runs and cases, viewer, plots as PNG."""
