"""Studies: commands that combine several runs (ladder, time to a Dice, spacing comparison, cross-validation, search, weights, demo)."""
