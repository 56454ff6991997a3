"""Orient, resample, normalise, crop: shared by training and prediction."""
