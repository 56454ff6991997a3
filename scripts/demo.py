"""`medseg demo` from a checkout; see README.md."""

from medseg.apps.demo import main

if __name__ == "__main__":
    main()
