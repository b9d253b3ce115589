"""The catalogue of metrics of all declared batches, which the conftest of the tests has loaded."""

from forgekeeper.api.batches import all_declared
from metrics import catalogue
from metrics.catalogue import collect_label_sets

SERIES = collect_label_sets(all_declared())
METRICS = catalogue.build_metrics(all_declared())


def select_process_metrics(process):
    """List the metrics of a kind of process."""
    return catalogue.select_metrics(process, METRICS)
