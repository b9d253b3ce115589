"""Guards: limits, circuit breaker and preconditions of a run."""
