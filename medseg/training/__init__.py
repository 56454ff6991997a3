"""The Lightning module, the data module, callbacks and schedules."""
