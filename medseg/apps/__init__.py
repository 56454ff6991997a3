"""The commands: the order of the steps."""
