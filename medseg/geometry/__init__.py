"""Geometry: voxel grids, boxes, axes and tiles, in numpy only."""
