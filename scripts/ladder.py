"""`medseg ladder` from a checkout; see README.md."""

from medseg.commands.ladder import main

if __name__ == "__main__":
    main()
