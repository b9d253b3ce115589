"""Coordination: what processes share in Redis: leases, and how values there are read."""
