"""Case tables, splits, the audit, the cache, training samples and augmentation."""
