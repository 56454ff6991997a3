"""Orient, resample, normalise and crop images, the same in training and prediction."""
