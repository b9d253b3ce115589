"""Benchmarks against peers that do the same work in the same run.

Machines are shared and noisy: only the ratio of two alternating measurements means anything. Each benchmark checks its
results before it reports a time.
"""
