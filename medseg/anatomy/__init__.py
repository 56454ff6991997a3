"""Knowledge of patients and organs: outline, sides, plausible volumes, disease, table of rules."""
