"""Orient, resample, normalise and crop: steps that training and prediction share."""
