"""The objects that train: Lightning module, data module, callbacks, optimiser and schedule."""
