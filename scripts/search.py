"""`medseg search` from a checkout; see README.md."""

from medseg.commands.search import main

if __name__ == "__main__":
    main()
