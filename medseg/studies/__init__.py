"""Studies: commands that combine several runs (ladder, spacing comparison, cross-validation, search, weights, demo)."""
