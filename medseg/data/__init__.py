"""Cases and training samples: case tables, splits, audit, cache, sampling and augmentation."""
