"""DICOM: file headers (`frames`), the stack that is meant (`stacks`), pixels of a slice (`pixels`), its regular grid (`read`)."""
