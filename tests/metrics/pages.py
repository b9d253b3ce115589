"""Pages of metrics as Prometheus reads them."""

from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families


class Scrape(NamedTuple):
    """A page, and what it says."""

    text: str
    samples: dict

    def value(self, name, **labels):
        """The value of a series, None where there is none; the prefix may be left out."""
        return self.samples.get((f"forgekeeper_{name}", frozenset(labels.items())))

    def series(self, name):
        """The values of a metric's series, by their label values."""
        return {
            tuple(value for _, value in sorted(labels)): value
            for (found, labels), value in self.samples.items()
            if found == f"forgekeeper_{name}"
        }

    @property
    def names(self):
        return {name for name, _ in self.samples}


def read(text):
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return Scrape(text, {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples})
