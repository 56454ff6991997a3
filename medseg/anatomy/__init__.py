"""Knowledge of patients and organs: outline, sides, plausible volumes, synthetic disease, rules."""
