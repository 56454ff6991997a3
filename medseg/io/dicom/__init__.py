"""DICOM: choice of series, slices and their pixels, SEG and RTSTRUCT read and written."""
