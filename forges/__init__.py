"""What fits forgekeeper to a forge's own tables: a package for each forge, and the command that applies it."""
