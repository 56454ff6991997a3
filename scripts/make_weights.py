"""`medseg make_weights` from a checkout; see README.md."""

from medseg.commands.make_weights import main

if __name__ == "__main__":
    main()
