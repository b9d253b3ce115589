"""Guards: limits, the breaker and the preconditions of a run."""
