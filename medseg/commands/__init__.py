"""Commands: read the configuration, call one function, print the result."""
