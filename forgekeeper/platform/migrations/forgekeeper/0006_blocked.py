"""Since when a batch is blocked, and why."""

from forgekeeper.platform.migrations import sql

up = sql("""
alter table batches
    add column blocked_since timestamptz,
    add column blocked_reason text,
    add column blocked_sentence text,
    add column child_blocked_at timestamptz;
""")
