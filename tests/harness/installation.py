"""The installation that the tests' database is of: sentinels that tests create carry its id."""

INSTALLATION = "7e57ab1e-0000-4000-8000-000000000001"
