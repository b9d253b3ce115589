"""Pages to come."""
