"""What tests of the tutorial share."""

from tests.harness.stores import folder  # noqa: F401
