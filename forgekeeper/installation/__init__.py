"""Which installation this is, and whether database, Redis and disks agree about it."""
