"""All that is known about patients and organs: outline, sides, plausible volumes, painted disease, and one table of rules."""
