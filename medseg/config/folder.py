"""Location of the configuration files."""

from pathlib import Path

import medseg.config.schema  # noqa: F401  (stores the defaults that conf/train.yaml names)


def conf_dir() -> Path:
    """Folder of the configuration: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"
