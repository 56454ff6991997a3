"""Import of nibabel without pydicom, for commands that read NIfTI files."""

import sys
from typing import Any


def import_nibabel() -> None:
    """Import nibabel without pydicom, where neither is imported yet.

    nibabel would import pydicom to read DICOM data in the extension of a NIfTI header; medseg reads
    no such extension, and the import takes 0.3 s of processor time. Other threads must not import
    pydicom meanwhile: they would find it missing.
    """
    if "nibabel" in sys.modules or "pydicom" in sys.modules:
        return
    modules: dict[str, Any] = sys.modules
    # An entry of None makes an import fail, as for a package that is not installed.
    modules["pydicom"] = None
    try:
        # This module imports all of nibabel that medseg uses.
        import medseg.io.nifti  # noqa: F401
    finally:
        del modules["pydicom"]
