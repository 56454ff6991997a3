"""All that is known about patients and organs.

Outline, sides, plausible volumes, painted disease, and one table of rules.
"""
