"""Cascade of two trained stages: localise the regions, refine each in its own crop, join them on the scanner's grid."""
