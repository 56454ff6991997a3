"""Train one stage: compose, check, hand over. `python train.py stage=coarse`; see README.md."""

from medseg.commands.train import main

if __name__ == "__main__":
    main()
