"""Commands of one run, and the table of all; commands of several runs are in `studies`."""
