"""Forecast of a whole run: its peak memory and duration, and the switches that fit a budget."""
