"""Reports: pages over runs and cases, the viewer of a case, overlays and plots as PNG."""
