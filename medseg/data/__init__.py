"""From a case table to samples: splits, audit, cache, sampling and augmentation."""
