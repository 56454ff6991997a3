"""Versions of medseg, Python and the libraries that a result depends on."""

import contextlib
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

from medseg import __version__


def collect_versions() -> dict[str, str]:
    """List the versions that a result depends on by name, and the commit if run from a checkout."""
    root = Path(__file__).resolve().parents[2]  # of the repository
    commit = ""
    if (root / ".git").exists():
        with contextlib.suppress(OSError):  # git is not installed: no commit is recorded
            commit = subprocess.run(
                ["git", "-C", str(root), "describe", "--always", "--dirty"],
                capture_output=True,
                text=True,
                check=False,
            ).stdout.strip()
    return {
        "medseg": __version__,
        "commit": commit,
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "lightning", "numpy")},
    }
