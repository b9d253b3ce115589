"""The catalogue of metrics, of all that the product declares: the tests' configuration has loaded its batches."""

from forgekeeper.api.batches import all_declared
from metrics import catalogue
from metrics.catalogue import series

SERIES = series(all_declared())
METRICS = catalogue.table(all_declared())


def of(process):
    """List the metrics of that kind of process."""
    return catalogue.of(process, METRICS)
