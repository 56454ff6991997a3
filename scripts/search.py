"""`medseg search` from a checkout; see README.md."""

from medseg.apps.search import main

if __name__ == "__main__":
    main()
