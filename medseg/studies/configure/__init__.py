"""The `configure` command: an experiment that fits a data set, a memory and a time."""
