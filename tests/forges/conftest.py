from tests.harness.adopted import adopted, keeper, owner  # noqa: F401
