"""`medseg ladder` from a checkout; see README.md."""

from medseg.apps.ladder import main

if __name__ == "__main__":
    main()
