"""What failed and is tried again or waits for a person: children so far."""

from forgekeeper.platform.migrations import sql

up = sql("""
create table quarantine (
    batch text not null,
    record text not null,
    key text not null,
    reason text not null,
    error text not null,
    failures integer not null default 1,
    since timestamptz not null,
    failed_at timestamptz not null,
    run bigint,
    primary key (batch, record, key)
);
""")
