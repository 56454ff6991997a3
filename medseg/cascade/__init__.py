"""Find the regions coarsely, refine each in its own crop, join them on the scanner's grid."""
