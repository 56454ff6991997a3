"""Geometry in numpy only: voxel grids, boxes, and the sizes that a network takes."""
