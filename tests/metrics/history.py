"""Half an hour of every series that the catalogue names, in OpenMetrics' text."""

from tests.harness.catalogue import METRICS

STEP = 15
STEPS = 120
ROOTS = (("artifacts",), ("repositories",))
AHEAD = {"forgekeeper_scheduler_next_run_timestamp_seconds", "forgekeeper_lease_expiry_timestamp_seconds"}
"""Instants that are still to come; all others are past."""


def openmetrics(end):
    """Write the pages of a worker, a scheduler and an exporter, scraped every 15 seconds until *end*."""
    return "\n".join([*_lines(end), "# EOF", ""])


def _lines(end):
    for metric in METRICS.values():
        yield f"# TYPE {metric.name.removesuffix('_total')} {metric.type}"
        for name, labels, values in _family(metric, end):
            yield from _series(name, {**_target(metric.process), **labels}, values, end)
    yield "# TYPE up gauge"
    for process in ("worker", "scheduler", "exporter"):
        yield from _series("up", _target(process), [1] * STEPS, end)


def _family(metric, end):
    """List the series of a metric: name, labels, values."""
    for child in metric.children if metric.children is not None else ROOTS:
        labels = dict(zip(metric.labels, child, strict=True))
        if metric.type == "histogram":
            yield from _histogram(metric, labels)
        elif metric.type == "counter":
            # A worker is restarted in the middle: what its log lines show.
            restarted = STEPS // 2 if metric.name == "forgekeeper_log_messages_total" else STEPS
            yield metric.name, labels, [place % restarted for place in range(STEPS)]
        else:
            yield metric.name, labels, [_state(metric.name, end)] * STEPS


def _histogram(metric, labels):
    slow = max(metric.buckets[:-1])
    for edge in (*metric.buckets, float("inf")):
        name = "+Inf" if edge == float("inf") else str(edge)
        counts = [place if edge >= slow else place // 2 for place in range(STEPS)]
        yield f"{metric.name}_bucket", {**labels, "le": name}, counts
    yield f"{metric.name}_sum", labels, range(STEPS)
    yield f"{metric.name}_count", labels, range(STEPS)


def _state(name, end):
    if not name.endswith("_timestamp_seconds"):
        return 1
    return end + 300 if name in AHEAD else end - 120


def _series(name, labels, values, end):
    text = ",".join(f'{label}="{value}"' for label, value in labels.items())
    for place, value in enumerate(values):
        yield f"{name}{{{text}}} {value} {end - (STEPS - 1 - place) * STEP:.3f}"


def _target(process):
    return {"job": f"forgekeeper-{process}", "instance": f"{process}.example:9090"}
