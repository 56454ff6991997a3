"""A training run's objects: Lightning module, data module, callbacks and schedules."""
