"""`medseg tune_loader` from a checkout; see README.md."""

from medseg.commands.tune_loader import main

if __name__ == "__main__":
    main()
