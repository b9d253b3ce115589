"""Older releases opened the breaker for a day whatever was due: none of them counts any more."""

from forgekeeper.platform.migrations import sql

up = sql("""
update batches set released_at = null, released_run = null where released_at is not null;
""")
