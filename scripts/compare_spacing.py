"""`medseg compare_spacing` from a checkout; see docs/SPACING.md."""

from medseg.apps.compare_spacing import main

if __name__ == "__main__":
    main()
