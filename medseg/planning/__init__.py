"""Peak memory and duration of a run before it starts, and the switches that fit into a budget."""
