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
# Name to the folder, the file of licences in it, and each npm package with its script. The versions
# on the command line come in the order of the packages.
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
# Between the parts of a file of licences.
SEPARATOR = "\n\n" + 80 * "-" + "\n"


def main(bundle: str, *versions: str) -> None:
    """Install the versions with npm into a temporary folder and copy scripts and licences.

    Args:
        bundle: A name of `BUNDLES`.
        versions: Version of each of its packages.

    Raises:
        ValueError: If there are more or fewer versions than packages.
    """
    folder, licence_file, scripts = BUNDLES[bundle]
    requirements = []
    for package, version in zip(scripts, versions, strict=True):
        requirements.append(f"{package}@{version}")
    checksums = []
    with tempfile.TemporaryDirectory() as install_dir:
        # npm checks the tarballs against the registry's checksums. `--ignore-scripts` keeps the
        # installed packages from running code of their own.
        npm = ["npm", "install", "--ignore-scripts", "--omit=optional", "--prefix", install_dir]
        subprocess.run([*npm, *requirements], check=True)
        packages = Path(install_dir) / "node_modules"
        for package, script in scripts.items():
            content = (packages / package / script).read_bytes()
            name = Path(script).name
            (folder / name).write_bytes(content)
            # The format of sha256sum: `sha256sum -c SHA256SUMS` checks the folder.
            checksums.append(f"{hashlib.sha256(content).hexdigest()}  {name}\n")
        licences = read_licences(packages)
    # The first part names the versions in its first line. For a package without a licence file on
    # npm (niivue), the licence of its repository follows; nothing here writes it, so it is kept.
    licence_path = folder / licence_file
    first_part = licence_path.read_text(encoding="utf-8").split(SEPARATOR)[0]
    _, _, kept_text = first_part.partition("\n")
    parts = [f"{', '.join(requirements)} and the packages inside\n{kept_text}".rstrip()]
    for text, names in licences.items():
        parts.append(f"{', '.join(names)}\n\n{text}")
    licence_path.write_text(SEPARATOR.join(parts) + "\n", encoding="utf-8")
    (folder / "SHA256SUMS").write_text("".join(checksums), encoding="utf-8")


def read_licences(packages: Path) -> dict[str, list[str]]:
    """Map the text of each licence to the packages that have it; many share one."""
    licences: dict[str, list[str]] = {}
    for path in sorted(packages.glob("**/*")):
        if path.stem.lower() == "license" and path.is_file():
            text = path.read_text(encoding="utf-8").strip()
            licences.setdefault(text, []).append(str(path.parent.relative_to(packages)))
    return licences


if __name__ == "__main__":
    main(*sys.argv[1:])
