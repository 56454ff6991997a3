"""Geometry in NumPy only: voxel grids, boxes, input sizes and strides of networks."""
