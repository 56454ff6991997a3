"""Location of the configuration files, and the choices in their groups."""

from pathlib import Path


def conf_dir() -> Path:
    """Folder of the configuration: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


def group_files(group: str) -> tuple[str, ...]:
    """List the names that may be chosen in a group of files; none for other keys."""
    return tuple(sorted(file.stem for file in (conf_dir() / group).glob("*.yaml")))
