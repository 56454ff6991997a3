"""`medseg find_lr` from a checkout; see README.md."""

from medseg.commands.find_lr import main

if __name__ == "__main__":
    main()
