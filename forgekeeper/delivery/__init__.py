"""Delivery: how a message reaches a worker, and what becomes of it there."""
