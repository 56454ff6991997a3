"""Facts about the included weights, without torch."""

INCLUDED_TASK = "lungs"
"""Task of the included weights, which is also that of `conf/train.yaml`."""
# The numbers were measured, see docs/prediction_memory.md.
TILE_WARNING = (
    "with the included lung weights, tiles of 96×96×96 agreed with whole crops to a Dice of 0.96 "
    "to 0.99, tiles of 64×64×64 to one of 0.76 to 0.93"
)
