"""Before a run: its peak memory and seconds, and the switches that fit into what there is."""
