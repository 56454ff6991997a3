"""A procedural chest CT with exact labels: anatomy, scanner and data set."""
