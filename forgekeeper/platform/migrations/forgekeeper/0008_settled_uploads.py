"""What became of direct uploads, kept beside Redis."""

from forgekeeper.platform.migrations import sql

up = sql("""
create table settled_uploads (
    location text not null,
    path text not null,
    reaped boolean not null,
    settled_at timestamptz not null default clock_timestamp(),
    run bigint,
    primary key (location, path)
);
create index settled_uploads_settled_at on settled_uploads (settled_at);
""")
