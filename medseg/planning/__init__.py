"""Memory and time of a whole run, computed before it starts."""
