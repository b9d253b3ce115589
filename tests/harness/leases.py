"""A lease that a test holds alone."""

from contextlib import contextmanager

from forgekeeper.platform.coordination.leases import LeaseTaken, hold_leases


@contextmanager
def hold_lease(client, name, **options):
    """Hold the lease *name* during the body, or raise `LeaseTaken` at once."""
    with hold_leases(client, [name], **options) as held:
        if name not in held:
            raise LeaseTaken(name)
        yield held[name]
