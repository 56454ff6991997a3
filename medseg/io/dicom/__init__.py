"""DICOM: file headers (`frames`), one stack (`stacks`), its grid (`read`), pixels (`pixels`)."""
