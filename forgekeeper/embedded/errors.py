"""What can go wrong with the embedded servers; every message is one sentence for a person."""


class EmbeddedError(Exception):
    """The servers could not be started; nothing of them is left running."""


class EmbeddedUnavailable(EmbeddedError):
    """The machine lacks something the servers need; the message says what to do about it."""
