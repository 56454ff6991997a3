"""Reports over many runs as one page, and the tables of all commands."""
