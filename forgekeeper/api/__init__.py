"""Declarations: the values that a batch returns, and the registry of batches and children."""
