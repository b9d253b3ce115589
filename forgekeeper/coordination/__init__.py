"""Coordination: what processes share in Redis: scripts, leases, and how a process reaches it."""
