"""Commands of several runs: configure, cross-validation, search, memory ladder, comparisons."""
