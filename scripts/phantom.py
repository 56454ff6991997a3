"""`medseg phantom` from a checkout; see README.md."""

from medseg.commands.phantom import main

if __name__ == "__main__":
    main()
