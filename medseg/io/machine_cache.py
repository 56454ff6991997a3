"""Cache folder of this user on this machine, with measurements and converted networks.

It may be deleted at any time.
"""

import os
from pathlib import Path


def machine_folder() -> Path:
    """Path of the folder, which may not exist yet.

    It is `medseg` in the folder of `XDG_CACHE_HOME` or, where that is unset, in `~/.cache`.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "medseg")
