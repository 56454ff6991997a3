"""Voxel grids, boxes, axes and tiles: numpy only, the ground floor."""
