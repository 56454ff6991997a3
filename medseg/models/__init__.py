"""Networks in plain torch, independent of precision, checkpointing and ranks."""
