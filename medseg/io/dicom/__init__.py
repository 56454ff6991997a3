"""DICOM: from file headers (`frames`) to stacks (`series`) on a regular grid (`stack`) in HU (`pixels`, `codecs`), all in `read`."""
