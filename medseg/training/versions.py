"""Versions of medseg, Python and the libraries that a result depends on."""

import platform
import subprocess
from functools import cache
from importlib.metadata import version
from pathlib import Path

from medseg import __version__


def collect_versions() -> dict[str, str]:
    """List the versions that a result depends on by name, and the commit if run from a checkout."""
    return {
        "medseg": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "lightning", "numpy")},
    }


@cache
def _commit() -> str:
    """Describe the commit of the checkout that holds this file, or return an empty text.

    Cached, because a later commit does not change the code that this process has loaded.
    """
    root = Path(__file__).resolve().parents[2]  # of the repository
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        description = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # git is not installed: no commit is recorded
        return ""
    return description.stdout.strip()
