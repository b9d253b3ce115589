"""Targets: object stores and git repositories."""
