"""Runs: their ledger, their plan, and the life of each from its start to its close."""
