"""Networks in plain torch; they know nothing of precision, checkpointing or ranks."""
