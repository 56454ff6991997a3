"""DICOM: file headers (`frames`), choice of one stack (`stacks`), pixels of a slice (`pixels`), grid of a stack (`read`)."""
