"""Coordination of processes in Redis: leases, and the parsing of values."""
