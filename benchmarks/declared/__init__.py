"""Batches for benchmarks, each declared where its module is imported: none of them beside the others by chance."""
