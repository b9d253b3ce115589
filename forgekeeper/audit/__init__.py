"""Audit: the acts of people and the deletions of batches, in two tables that only grow."""
