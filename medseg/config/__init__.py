"""Typed configuration: schema, checks and rules between keys."""
