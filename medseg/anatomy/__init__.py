"""Knowledge of patients and organs: outline, sides, plausible volumes, painted disease, rules."""
