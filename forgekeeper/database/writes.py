"""Writes of the engine, in sessions that may only read."""

WRITE = "set transaction read write; "
