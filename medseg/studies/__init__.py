"""Studies: commands that combine several runs, such as ladder, cross-validation and search."""
