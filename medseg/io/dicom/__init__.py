"""DICOM: catalogue and choice of series, stacks of slices and their pixels, SEG and RTSTRUCT read and written."""
