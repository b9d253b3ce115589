"""Every query of every panel, asked of a real Prometheus: it is understood, and there is something to show."""

import math
import re
import time

import pytest

from metrics.dashboards.limits import documented
from tests.harness.catalogue import METRICS
from tests.harness.every import every

from .reading import CHOICES, QUERIES, family, selectors


def values(answer):
    """List all values of an answer."""
    assert answer["status"] == "success", answer["error"]
    assert "warnings" not in answer, answer["warnings"]
    for series in answer["data"]["result"]:
        for _instant, value in series.get("values") or [series["value"]]:
            yield float(value)


def whose(expr):
    """Name the batches that have the one metric that is asked for; none if it is asked for otherwise."""
    asked = [(METRICS.get(family(name)), matchers) for name, matchers in selectors(expr)]
    if len(asked) != 1 or asked[0][0] is None or asked[0][1] != [("batch", "=", "$batch")]:
        return set()
    return set(asked[0][0].values["batch"])


def put(asked, batch):
    """Ask the query as Grafana would, of the last 25 minutes."""
    given = {"$__rate_interval": "1m", "$__range": "30m", "$batch": batch}
    expr = re.sub(r"\$\w+", lambda variable: given[variable[0]], asked.expr)
    if asked.now:
        return "query", {"query": expr}
    return "query_range", {"query": expr, "start": time.time() - 1500, "end": time.time(), "step": 60}


@every("asked", QUERIES)
def test_a_query_has_something_to_show(asked, ask):
    answered = []

    for batch in CHOICES if "$batch" in asked.expr else [None]:
        path, parameters = put(asked, batch)
        answered += values(ask(path, **parameters))

    assert any(math.isfinite(value) for value in answered)


@every("asked", [one for one in QUERIES if whose(one.expr)])
def test_a_query_answers_for_the_batches_that_have_such_a_metric_and_for_no_others(asked, ask):
    answered = set()

    for batch in CHOICES:
        path, parameters = put(asked, batch)
        if list(values(ask(path, **parameters))):
            answered.add(batch)

    assert answered == whose(asked.expr)


@pytest.mark.parametrize(
    ("panel", "limits"),
    [("Duration", documented("duration")), ("Backlog", documented("backlog"))],
)
def test_the_limit_of_the_document_is_drawn_for_the_batches_that_have_one(panel, limits, ask):
    (asked,) = [one for one in QUERIES if (one.panel, one.legend) == (panel, "limit of the document")]
    drawn = {}

    for batch in CHOICES:
        path, parameters = put(asked, batch)
        for value in values(ask(path, **parameters)):
            drawn.setdefault(batch, set()).add(value)

    assert drawn == {batch: {limit} for batch, limit in limits.items()}
