"""Expressions that occur again and again.

A metric is named without its prefix and, being a counter, without `_total`.  Grafana chooses
the span that a rate is taken over; it is never shorter than four scrapes.
"""

from __future__ import annotations

from collections.abc import Mapping

HERE = 'batch="$batch"'
"""Of the batch that the reader has chosen."""


def grown(metric: str, by: str = "", where: str = "") -> str:
    """How much a counter grew within the rate interval."""
    return f"{_summed(by)}(increase({_counter(metric, where)}[$__rate_interval]))"


def each_second(metric: str, by: str = "", where: str = "") -> str:
    """How fast a counter grows."""
    return f"{_summed(by)}(rate({_counter(metric, where)}[$__rate_interval]))"


def each_minute(metric: str, by: str = "", where: str = "") -> str:
    """How fast a counter grows, of what happens a few times a minute."""
    return f"60 * {each_second(metric, by, where)}"


def within(share: float, metric: str, by: str = "", where: str = "") -> str:
    """In how many seconds the *share* of what a histogram counts was over."""
    buckets = f"{_selected(f'{metric}_seconds_bucket', where)}[$__rate_interval]"
    return f"histogram_quantile({share}, {_summed(f'{by}, le' if by else 'le')}(rate({buckets})))"


def of_the_batch(limits: Mapping[str, float]) -> str:
    """Write a query that answers with the limit of the batch, and nothing for one that has none."""
    wholes = sorted(set(limits.values()))
    names = ["|".join(name for name in limits if limits[name] == whole) for whole in wholes]
    return " or ".join(
        f'{whole:g} * max by (batch) (forgekeeper_info{{batch="$batch",batch=~"{found}"}})'
        for whole, found in zip(wholes, names, strict=True)
    )


def _counter(metric: str, where: str) -> str:
    return _selected(f"{metric}_total", where)


def _selected(metric: str, where: str) -> str:
    return f"forgekeeper_{metric}{{{where}}}" if where else f"forgekeeper_{metric}"


def _summed(by: str) -> str:
    return f"sum by ({by}) " if by else "sum"
