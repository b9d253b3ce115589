"""Sources: tables and registers that list due items, such as the outbox."""
