"""`medseg predict` from a checkout; see README.md."""

from medseg.commands.predict import main

if __name__ == "__main__":
    main()
