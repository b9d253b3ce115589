"""Log lines, counters and endpoints for operators."""
