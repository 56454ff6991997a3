"""Only the modules named here know what a lung is; all others speak of the regions of the task."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "medseg"
FOLDERS = ("anatomy/", "weights/", "phantom/")
FILES = {
    "__init__.py": "LungSegmenter",
    "prediction/segmenter.py": "LungSegmenter",
    "data/options.py": "disease_each_lung",
}
"""Module to the only name with the word that it may hold."""
WHOLE_FILES = {
    "studies/baselines.py",  # a package of others has the word in its name
    "data/importers/folders.py",  # so has the folder of a public data set
}


def test_no_other_module_knows_lungs() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name.startswith(FOLDERS) or name in WHOLE_FILES:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            allowed = FILES.get(name, "")
            rest = line.replace(allowed, "") if allowed else line
            if "lung" in rest.lower():
                found.append(f"{name}:{number}: {line.strip()}")
    assert not found, "use the names of the task's regions: " + "\n".join(found)
