"""Overlap and surface scores of label maps, in mm and ml."""
