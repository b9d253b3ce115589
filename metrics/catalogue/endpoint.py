"""The metrics of one process, as they are written down."""

from __future__ import annotations

from metrics.catalogue.metric import Children, Metric, Process

SECONDS = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 250.0, 300.0, 600.0, 1800.0)
"""Edges of the histograms of runs; the documents' limits are among them."""
REQUEST_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Endpoint:
    """The metrics of one process, in the order in which the documentation lists them."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.metrics: list[Metric] = []

    def counter(self, name: str, text: str, labels: str = "", children: Children = ((),)) -> None:
        """Add a counter."""
        names = tuple(labels.split())
        self.metrics.append(Metric(f"forgekeeper_{name}_total", "counter", names, children, "", text, self.process))

    def gauge(self, name: str, text: str, labels: str = "", children: Children | None = ((),)) -> None:
        """Add a gauge."""
        unit, names = "seconds" if name.endswith("_seconds") else "", tuple(labels.split())
        self.metrics.append(Metric(f"forgekeeper_{name}", "gauge", names, children, unit, text, self.process))

    def histogram(
        self, name: str, text: str, label: str, children: Children, edges: tuple[float, ...] = SECONDS
    ) -> None:
        """Add a histogram."""
        name = f"forgekeeper_{name}_seconds"
        self.metrics.append(Metric(name, "histogram", (label,), children, "seconds", text, self.process, edges))
