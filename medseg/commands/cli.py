"""`medseg <command> …` after installation: the same commands as `train.py` and `scripts/*.py`."""

from __future__ import annotations

import importlib
import sys

from medseg import __version__

COMMANDS = {
    "train": "train one stage (stage=coarse or stage=fine)",
    "search": "train many trials of a space, the better ones to their end",
    "prepare": "check every case and fill the cache",
    "ladder": "measure what each switch buys, added one at a time",
    "compare_spacing": "train spacing strategies on the same cases and score them by thickness of slices",
    "find_lr": "find the learning rate at which the loss falls steepest",
    "tune_loader": "measure which loader settings make batches fastest here",
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
    """Hand over to the command; each of them takes Hydra's `key=value` arguments."""
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command in ("--version", "-V"):
        print(__version__)
    elif command in COMMANDS:
        # What Hydra shows as the program's name, and what a launcher starts again.
        sys.argv = [f"medseg {command}", *sys.argv[2:]]
        importlib.import_module(f"medseg.commands.{command}").main()
    else:
        known = command in ("--help", "-h")
        text = ["usage: medseg <command> key=value …   (`medseg <command> --cfg job` prints all keys)", ""]
        text += [f"  {name:16s}{what}" for name, what in COMMANDS.items()]
        if not known:
            text.append(f"\nmedseg: there is no command {command}")
        print("\n".join(text), file=sys.stdout if known else sys.stderr)
        sys.exit(0 if known else 2)


if __name__ == "__main__":
    main()
