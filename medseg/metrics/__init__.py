"""Overlap and surface scores of two masks, in mm and ml."""
