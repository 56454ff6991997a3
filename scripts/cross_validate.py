"""`medseg cross_validate` from a checkout; see README.md."""

from medseg.commands.cross_validate import main

if __name__ == "__main__":
    main()
