"""Case tables, the cache, samples, augmentation and the phantom."""
