"""Fixtures for the tests of the engine."""

from tests.harness.stores import folder  # noqa: F401
