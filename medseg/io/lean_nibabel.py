"""Import of nibabel without pydicom, for commands that read NIfTI files."""

import sys
from typing import Any


def import_nibabel() -> None:
    """Import nibabel without pydicom, where neither is imported yet.

    nibabel reads a DICOM data set in the extension of a NIfTI header with it; medseg reads no such
    extension, and pydicom with its decoders takes 0.3 s of processor time. Other threads must not
    import pydicom meanwhile.
    """
    if "nibabel" in sys.modules or "pydicom" in sys.modules:
        return
    modules: dict[str, Any] = sys.modules
    # An entry of None makes the import fail, as for a package that is not installed.
    modules["pydicom"] = None
    try:
        import medseg.io.nifti  # noqa: F401
    finally:
        del modules["pydicom"]
