"""`medseg prepare` from a checkout; see README.md."""

from medseg.commands.prepare import main

if __name__ == "__main__":
    main()
