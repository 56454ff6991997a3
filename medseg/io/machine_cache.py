"""Cache folder of this machine, which may be deleted at any time: measurements and converted networks."""

import os
from pathlib import Path


def machine_folder() -> Path:
    """Path of the folder, `~/.cache/medseg` unless `XDG_CACHE_HOME` says otherwise; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "medseg"
