"""`python -m medseg` is the program `medseg`."""

from medseg.commands.cli import main

if __name__ == "__main__":
    main()
