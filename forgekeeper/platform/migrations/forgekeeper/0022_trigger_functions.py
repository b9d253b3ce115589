"""No role but the owner puts trigger functions that run with the owner's rights on a table of its own."""

from forgekeeper.platform.migrations import sql

up = sql("revoke execute on function batches_changed(), holds_changed() from public")
