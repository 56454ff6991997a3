"""nibabel alone: a command reads NIfTI files without pydicom, which stays usable."""

import subprocess
import sys

PROGRAM = """
import sys
from medseg.io.lean_nibabel import import_nibabel

import_nibabel()
assert "nibabel.nifti1" in sys.modules
assert "pydicom" not in sys.modules
import pydicom

assert pydicom.Dataset
import_nibabel()
assert sys.modules["pydicom"] is pydicom
"""


def test_nibabel_is_imported_without_pydicom_which_can_be_imported_later() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
