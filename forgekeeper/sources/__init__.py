"""Sources: tables that list due items, such as the outbox."""
