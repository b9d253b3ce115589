"""Adapters for the tables of forges: a package for each forge, and the command `adopt`."""
