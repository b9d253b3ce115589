"""The installation's id, so that no other's repositories or objects are taken for its own."""

from forgekeeper.platform.migrations import sql

up = sql("""
create table installation (
    id uuid primary key default gen_random_uuid(),
    made_at timestamptz not null default clock_timestamp()
);
create unique index one_installation on installation ((true));
insert into installation default values;
""")
