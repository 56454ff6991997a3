"""`medseg demo` from a checkout; see README.md."""

from medseg.commands.demo import main

if __name__ == "__main__":
    main()
