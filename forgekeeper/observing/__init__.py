"""Observing: what of the engine and of the batches becomes a metric."""
