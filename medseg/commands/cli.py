"""The `medseg` program: `medseg <command> key=value …`, the same commands as `train.py` and `scripts/*.py`."""

import sys

from medseg import __version__
from medseg.commands.entry import COMMANDS, run_command


def main() -> None:
    """Run the command that the first argument names; commands take Hydra's `key=value` arguments."""
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command == "watch" and len(sys.argv) > 2 and not sys.argv[2].startswith("-") and "=" not in sys.argv[2]:
        sys.argv[2] = f"run={sys.argv[2]}"
    if command in COMMANDS:
        # Hydra shows this name in its messages, and launchers start it again.
        sys.argv = [f"medseg {command}", *sys.argv[2:]]
        run_command(command)
    elif command in ("--version", "-V"):
        print(__version__)
    else:
        is_help = command in ("--help", "-h")
        text = ["usage: medseg <command> key=value …   (`medseg <command> --help` prints all keys)", ""]
        text += [f"  {name:16s}{sentence}" for name, (*_, sentence) in COMMANDS.items()]
        text += [] if is_help else [f"\nmedseg: there is no command {command}"]
        print("\n".join(text), file=sys.stdout if is_help else sys.stderr)
        sys.exit(0 if is_help else 2)


if __name__ == "__main__":
    main()
