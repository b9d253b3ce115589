from tests.harness.adopted import adopted, gitlab, keeper, owner  # noqa: F401
