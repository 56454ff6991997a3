"""Location of the configuration files, and the choices in their groups."""

from pathlib import Path


def conf_dir() -> Path:
    """Folder of the configuration: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "conf"
    if installed.is_dir():
        return installed
    return package.parent / "conf"


def group_files(group: str) -> tuple[str, ...]:
    """List the choices of a configuration group: the stems of its files, sorted.

    Args:
        group: Name of the group; there are no choices if no group has this name.
    """
    return tuple(sorted(file.stem for file in (conf_dir() / group).glob("*.yaml")))
