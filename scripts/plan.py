"""`medseg plan` from a checkout; see README.md."""

from medseg.commands.plan import main

if __name__ == "__main__":
    main()
