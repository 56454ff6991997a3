"""Studies: commands that combine several runs.

They are ladder, time to a Dice, spacing comparison, cross-validation, search, weights and demo.
"""
