"""Importers: data sets in the layouts of other programs, read as cases and a task."""
