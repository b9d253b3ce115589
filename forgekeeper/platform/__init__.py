"""The platform: database, migrations, settings, connections, leases and shutdown."""
