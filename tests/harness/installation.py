"""The id of the test database's installation, which the sentinels of tests contain."""

INSTALLATION = "7e57ab1e-0000-4000-8000-000000000001"
