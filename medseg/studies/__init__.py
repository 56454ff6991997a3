"""Commands that combine several runs: cross-validation, search, memory ladder, comparisons."""
