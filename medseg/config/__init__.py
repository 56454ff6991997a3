"""The typed configuration and its cross-checks; only build and apps import it."""
