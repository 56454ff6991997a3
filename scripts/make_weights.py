"""`medseg make_weights` from a checkout; see README.md."""

from medseg.apps.make_weights import main

if __name__ == "__main__":
    main()
