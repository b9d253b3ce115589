"""Records that failed alone: skipped for a growing while."""

from forgekeeper.platform.migrations import sql

up = sql("""
create table passed_over_records (
    batch text not null,
    record text not null,
    key text not null,
    failures integer not null default 1,
    first_failed_at timestamptz not null,
    last_failed_at timestamptz not null,
    retry_at timestamptz not null,
    error text not null,
    primary key (batch, record, key)
);
""")
