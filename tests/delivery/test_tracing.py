"""Traces where nobody records any: OpenTelemetry's interface is installed, and nothing was configured."""

import dramatiq
import pytest
from dramatiq.broker import MessageProxy

from forgekeeper.delivery.tracing import HEADER, Tracing

TRACE = "0af7651916cd43dd8448eb211c80319c"


def message(**options):
    return dramatiq.Message("q", "act", (), {}, options, "1")


@pytest.fixture
def sent_meanwhile():
    """Return the options of a message that is sent while another is worked on."""
    tracing = Tracing()

    def sent(**options):
        sender, successor = MessageProxy(message(**options)), message()
        tracing.before_process_message(None, sender)
        tracing.before_enqueue(None, successor, None)
        tracing.after_process_message(None, sender)
        return successor.options

    return sent


def test_a_message_hands_its_senders_trace_on_where_no_spans_are_recorded(sent_meanwhile):
    assert TRACE in sent_meanwhile(**{HEADER: f"00-{TRACE}-b7ad6b7169203331-01"})[HEADER]


def test_a_message_without_a_trace_hands_none_on(sent_meanwhile):
    assert sent_meanwhile() == {}


def test_a_trace_ends_with_its_message(sent_meanwhile):
    sent_meanwhile(**{HEADER: f"00-{TRACE}-b7ad6b7169203331-01"})

    assert sent_meanwhile() == {}
