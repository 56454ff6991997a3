"""Files are written whole: by the atomic writer, or in a folder that is renamed at the end."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WRITES = re.compile(
    r"write_text\(|write_bytes\(|open\([^)]*[\"'][wax]|np\.save|json\.dump\(|os\.replace|"
    r"to_csv|torch\.save\("
)
ALLOWED = {
    "io/atomic.py": "the writer",
    "io/nifti.py": "voxels into its temporary file",
    "io/simpleitk.py": "voxels into its temporary file; a copy of a header in a temporary folder",
    "data/cache.py": "a temporary folder, whose files reach the disk before it gets its name",
    "memory/profile.py": "a request to the kernel, in /proc",
    "planning/process.py": "the log of a tiny training, in a temporary folder",
    "planning/rehearsal.py": "the numbers of a tiny training, in a temporary folder",
    "planning/synthetic_samples.py": "a synthetic case, in a temporary folder",
    "runs/ranks.py": "lines appended to a log",
}


def test_only_the_atomic_writer_writes_files() -> None:
    found = {
        str(path.relative_to(ROOT / "medseg")): line
        for path in (ROOT / "medseg").rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if WRITES.search(line) and not line.lstrip().startswith(("#", "def "))
    }
    assert {path: line for path, line in found.items() if path not in ALLOWED} == {}
    for path in ("io/atomic.py", "data/cache.py"):
        assert "os.fsync" in (ROOT / "medseg" / path).read_text(encoding="utf-8")
