"""Update of the bundled JavaScript; needs npm.

    python scripts/update_bundled.py niivue 0.69.0
    python scripts/update_bundled.py vega 6.4.0 6.4.3 7.3.0

niivue (BSD-2-Clause) draws the case viewer; Vega, Vega-Lite and Vega-Embed (BSD-3-Clause) draw the
charts of the pages. Their published scripts are kept as they are, so that their checksums can be
compared with npm's. Beside them lie the licences and the checksums.
"""

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "medseg"
# Name to the folder, the file of licences, and each npm package with its script.
BUNDLES = {
    "niivue": (
        PACKAGE / "report" / "viewer_page",
        "niivue.LICENSE.txt",
        {"@niivue/niivue": "dist/niivue.umd.js"},
    ),
    "vega": (
        PACKAGE / "report" / "page" / "vega",
        "LICENSE.txt",
        {name: f"build/{name}.min.js" for name in ("vega", "vega-lite", "vega-embed")},
    ),
}
SEPARATOR = "\n\n" + 80 * "-" + "\n"


def main(bundle: str, *versions: str) -> None:
    """Install the versions with npm into a temporary folder and copy scripts and licences."""
    folder, licence_file, scripts = BUNDLES[bundle]
    requirements = []
    for package, version in zip(scripts, versions, strict=True):
        requirements.append(f"{package}@{version}")
    checksums = []
    with tempfile.TemporaryDirectory() as install_dir:
        # The tarballs are checked by npm against the registry's checksums; no script of a package
        # runs.
        npm = ["npm", "install", "--ignore-scripts", "--omit=optional", "--prefix", install_dir]
        subprocess.run([*npm, *requirements], check=True)
        packages = Path(install_dir) / "node_modules"
        for package, script in scripts.items():
            content = (packages / package / script).read_bytes()
            name = Path(script).name
            (folder / name).write_bytes(content)
            checksums.append(f"{hashlib.sha256(content).hexdigest()}  {name}\n")
        licences = read_licences(packages)
    # A package without a licence file on npm (niivue) has that of its repository in the first part,
    # which is kept: all after its first line.
    first_part = (folder / licence_file).read_text(encoding="utf-8").split(SEPARATOR)[0]
    kept_text = first_part.partition("\n")[2].rstrip()
    parts = [f"{', '.join(requirements)} and the packages inside\n{kept_text}".rstrip()]
    for text, names in licences.items():
        parts.append(f"{', '.join(names)}\n\n{text}")
    (folder / licence_file).write_text(SEPARATOR.join(parts) + "\n", encoding="utf-8")
    (folder / "SHA256SUMS").write_text("".join(checksums), encoding="utf-8")


def read_licences(packages: Path) -> dict[str, list[str]]:
    """Text of each licence to the packages that have it; many share one."""
    licences: dict[str, list[str]] = {}
    for path in sorted(packages.glob("**/*")):
        if path.stem.lower() == "license" and path.is_file():
            text = path.read_text(encoding="utf-8").strip()
            licences.setdefault(text, []).append(str(path.parent.relative_to(packages)))
    return licences


if __name__ == "__main__":
    main(*sys.argv[1:])
