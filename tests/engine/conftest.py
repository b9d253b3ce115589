"""What tests of answers share."""

from tests.harness.stores import folder  # noqa: F401
