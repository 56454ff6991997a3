"""Update of the bundled Vega: `python scripts/update_vega.py 6.4.0 6.4.3 7.3.0` (needs npm) writes scripts, licences and checksums.

Vega, Vega-Lite and Vega-Embed (BSD-3-Clause) draw the charts of the pages. Their published scripts are kept as they are, so that their
checksums can be compared with npm's.
"""

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "medseg" / "report" / "page" / "vega"
PACKAGES = ("vega", "vega-lite", "vega-embed")
SEPARATOR = "\n\n" + 80 * "-" + "\n"


def main(*versions: str) -> None:
    """Install the versions with npm into a temporary folder and copy what the pages need."""
    with tempfile.TemporaryDirectory() as folder:
        packages = Path(folder) / "node_modules"
        # The tarballs are checked by npm against the registry's checksums; no script of a package runs.
        wanted = [f"{package}@{version}" for package, version in zip(PACKAGES, versions, strict=True)]
        subprocess.run(["npm", "install", "--ignore-scripts", "--prefix", folder, *wanted], check=True)
        checksums: list[str] = []
        licences: dict[str, list[str]] = {}  # many packages share one text
        for package in PACKAGES:
            script = packages / package / "build" / f"{package}.min.js"
            (FOLDER / script.name).write_bytes(script.read_bytes())
            checksums.append(f"{hashlib.sha256(script.read_bytes()).hexdigest()}  {script.name}\n")
        for path in sorted(path for path in packages.glob("**/*") if path.stem.lower() == "license" and path.is_file()):
            licences.setdefault(path.read_text(encoding="utf-8").strip(), []).append(str(path.parent.relative_to(packages)))
    texts = [
        f"{', '.join(wanted)} and the packages inside them",
        *(f"{', '.join(names)}\n\n{text}" for text, names in licences.items()),
    ]
    (FOLDER / "LICENSE.txt").write_text(SEPARATOR.join(texts) + "\n", encoding="utf-8")
    (FOLDER / "SHA256SUMS").write_text("".join(checksums), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
