"""Example of a plugin of medseg: a network, a loss, a transform and an experiment, see docs/extending.md of medseg."""
