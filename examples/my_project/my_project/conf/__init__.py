"""Configuration files of the example; Hydra finds them as `pkg://my_project.conf`, which must be a package."""
