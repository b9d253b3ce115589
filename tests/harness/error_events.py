"""Events that a receiver in the place of Sentry has got."""

import gzip

from sentry_sdk.envelope import Envelope


def make_dsn(receiver):
    """Return the DSN by which a process reports to the receiver."""
    return receiver.url.replace("http://", "http://key@") + "/1"


def read_events(receiver):
    """Parse the events of all envelopes."""
    bodies = [
        gzip.decompress(one.body) if one.headers.get("content-encoding") == "gzip" else one.body
        for one in receiver.requests
    ]
    return [item.get_event() for body in bodies for item in Envelope.deserialize(body).items]
