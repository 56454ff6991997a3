"""`medseg report` from a checkout; see README.md."""

from medseg.commands.report import main

if __name__ == "__main__":
    main()
