"""Configuration of each command: composed of the options of the packages, checked, explained."""
