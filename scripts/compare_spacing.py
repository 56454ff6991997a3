"""`medseg compare_spacing` from a checkout; see README.md."""

from medseg.commands.compare_spacing import main

if __name__ == "__main__":
    main()
