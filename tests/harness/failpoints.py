"""The failpoints there are."""

from forgekeeper.batches import all_declared


def failpoints():
    """Name the engine's failpoints and those that the batches of this process declare."""
    return ["run.closed", "tick.claimed", "tick.sent", *(step for one in all_declared() for step in one.steps)]
