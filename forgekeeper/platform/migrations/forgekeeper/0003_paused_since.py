"""Since when a batch is paused."""

from forgekeeper.platform.migrations import sql

up = sql("""
alter table batches add column paused_since timestamptz;
update batches set paused_since = clock_timestamp() where paused_until is not null;
""")
