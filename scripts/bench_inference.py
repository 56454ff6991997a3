"""`medseg bench_inference` from a checkout; see docs/PREDICT.md."""

from medseg.apps.bench_inference import main

if __name__ == "__main__":
    main()
