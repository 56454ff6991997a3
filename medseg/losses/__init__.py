"""Losses on logits and integer targets."""
