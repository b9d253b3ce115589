"""Batches for benchmarks; the import of a module declares its batch, and no other."""
