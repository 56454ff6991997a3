"""`medseg evaluate` from a checkout; see README.md."""

from medseg.commands.evaluate import main

if __name__ == "__main__":
    main()
