"""DICOM: file headers (`frames`), pixels of a slice in HU (`pixels`), and one series on a regular grid (`read`)."""
