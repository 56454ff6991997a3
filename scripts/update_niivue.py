"""Update of the bundled niivue: `python scripts/update_niivue.py 0.69.0` (needs npm) writes script, licences and checksums.

niivue (BSD-2-Clause) draws the case viewer. The published script is kept as it is, so that its checksum can be compared with npm's.
"""

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "medseg" / "pictures" / "viewer"
# The package on npm has no licence file; this is the one of its repository.
OWN_LICENCE = FOLDER / "niivue.LICENSE.txt"
SEPARATOR = "\n\n" + 80 * "-" + "\n"


def main(version: str) -> None:
    """Install a version with npm into a temporary folder and copy what the viewer needs."""
    with tempfile.TemporaryDirectory() as folder:
        packages = Path(folder) / "node_modules"
        # Its tarball is checked by npm against the registry's checksum; no script of the package runs.
        command = ["npm", "install", "--ignore-scripts", "--omit=optional", "--prefix", folder, f"@niivue/niivue@{version}"]
        subprocess.run(command, check=True)
        script = (packages / "@niivue" / "niivue" / "dist" / "niivue.umd.js").read_bytes()
        own = OWN_LICENCE.read_text(encoding="utf-8").split(SEPARATOR)[0].partition("\n")[2]
        licences = [f"@niivue/niivue {version}\n{own.rstrip()}"]
        for path in sorted(path for path in packages.glob("**/*") if path.name.lower() in ("license", "license.md")):
            text = path.read_text(encoding="utf-8").strip()
            licences.append(f"{path.parent.relative_to(packages)}, bundled in niivue\n\n{text}")
    (FOLDER / "niivue.umd.js").write_bytes(script)
    OWN_LICENCE.write_text(SEPARATOR.join(licences) + "\n", encoding="utf-8")
    (FOLDER / "SHA256SUMS").write_text(f"{hashlib.sha256(script).hexdigest()}  niivue.umd.js\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
