"""Files in and out: the only code that meets nibabel and pydicom."""
