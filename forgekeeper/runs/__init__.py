"""Runs: which ticks become one, and how each is claimed, sent, kept alive and closed."""
