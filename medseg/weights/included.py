"""Name of the task of the included weights, without torch."""

INCLUDED_TASK = "lungs"
"""Task of the included weights, which is also that of `conf/train.yaml`."""
