"""Commands that do one thing, such as `train`, and the table of all; see `studies` for the rest."""
