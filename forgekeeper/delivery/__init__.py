"""Delivery: messages, from the enqueue to the one step in Redis that ends each."""
