"""The catalogue of metrics, of all that the product declares: the tests' configuration has loaded its batches."""

from forgekeeper.api.batches import all_declared
from metrics import catalogue
from metrics.catalogue import collect_label_sets

SERIES = collect_label_sets(all_declared())
METRICS = catalogue.build_metrics(all_declared())


def select_process_metrics(process):
    """List the metrics of that kind of process."""
    return catalogue.select_metrics(process, METRICS)
