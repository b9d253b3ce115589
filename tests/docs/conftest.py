"""Fixtures for the tests of the tutorial."""

from tests.harness.stores import folder  # noqa: F401
