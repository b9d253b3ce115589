import socket

import pytest

from tests.harness.catalogue import LABELS, METRICS


def test_the_command_prints_the_catalogue(main):
    result = main("metrics", "--json")

    assert [metric["name"] for metric in result.json["metrics"]] == list(METRICS)
    assert result.json["metrics"][0]["labels"] == {"batch": list(LABELS.names)}


def test_the_command_names_every_metric_for_people(main):
    result = main("metrics")

    assert [name for name in METRICS if name not in result.stdout] == []


@pytest.fixture
def busy_port():
    """A port that somebody listens at already."""
    with socket.create_server(("127.0.0.1", 0)) as somebody:
        yield somebody.getsockname()[1]


def test_an_exporter_whose_port_is_busy_does_not_start(forgekeeper, settings, busy_port):
    result = forgekeeper("exporter", METRICS_PORT_EXPORTER=str(busy_port))

    assert result.status == 1
    assert result.complaint == (
        f"cannot serve metrics at 127.0.0.1:{busy_port}: Address already in use; stop what is there, or choose another port"
    )


def test_an_exporter_without_a_page_is_wrong_use(forgekeeper, settings):
    result = forgekeeper("exporter", METRICS_PORT_EXPORTER="0")

    assert result.status == 2
    assert "nothing to do" in result.complaint
