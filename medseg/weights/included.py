"""Which task the included weights are for; read without torch."""

INCLUDED_TASK = "lungs"
"""Task of the included weights, which is also that of `conf/train.yaml`."""
