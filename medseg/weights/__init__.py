"""Files of trained weights, model folders of medseg, and the included weights."""
