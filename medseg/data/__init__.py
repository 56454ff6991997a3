"""Cases and training samples: importers, case table, audit, splits, cache, draws, augmentation."""
