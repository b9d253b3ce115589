"""The world outside database and Redis."""
