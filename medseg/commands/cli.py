"""The `medseg` program: `medseg <command> key=value …`, the same commands as `train.py` and `scripts/*.py`."""

import importlib
import sys

from medseg import __version__

COMMANDS = {
    "train": "train one stage (stage=coarse or stage=fine)",
    "search": "train many trials of a space, the better ones to their end",
    "prepare": "check every case and fill the cache",
    "ladder": "measure what each switch saves, added one at a time",
    "compare_spacing": "train spacing strategies on the same cases and score them by slice thickness",
    "find_lr": "find the learning rate at which the loss falls fastest",
    "tune_loader": "measure which loader settings are fastest on this machine",
    "plan": "count the memory of a training step before anything runs",
    "predict": "segment scans with two checkpoints",
    "evaluate": "score label maps against a reference",
    "report": "compare runs on one page",
    "cross_validate": "train and score fold by fold, by patient",
    "make_weights": "train on all cases and write the weights as small files",
    "phantom": "make chest phantoms with exact labels",
    "demo": "phantoms, both stages, prediction and scores in minutes",
}


def main() -> None:
    """Run the command that the first argument names; commands take Hydra's `key=value` arguments."""
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command in COMMANDS:
        # Hydra shows this name in its messages, and launchers start it again.
        sys.argv = [f"medseg {command}", *sys.argv[2:]]
        importlib.import_module(f"medseg.commands.{command}").main()
    elif command in ("--version", "-V"):
        print(__version__)
    else:
        is_help = command in ("--help", "-h")
        text = ["usage: medseg <command> key=value …   (`medseg <command> --help` prints all keys)", ""]
        text += [f"  {name:16s}{sentence}" for name, sentence in COMMANDS.items()]
        text += [] if is_help else [f"\nmedseg: there is no command {command}"]
        print("\n".join(text), file=sys.stdout if is_help else sys.stderr)
        sys.exit(0 if is_help else 2)


if __name__ == "__main__":
    main()
