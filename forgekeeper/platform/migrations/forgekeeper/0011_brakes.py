"""Stopped and held batches, cancelled runs, and how much runs and their children have deleted."""

from forgekeeper.platform.migrations import sql

up = sql("""
alter table batches
    add column stopped_since timestamptz,
    add column stopped_reason text,
    add column stopped_by text,
    add column held_since timestamptz,
    add column held_reason text,
    add column held_sentence text,
    add column released_at timestamptz,
    add column released_reason text,
    add column released_by text,
    add column released_expect bigint,
    add column released_run bigint;
alter table job_runs
    add column cancelled_at timestamptz,
    add column cancelled_reason text,
    add column cancelled_by text,
    add column ordinary boolean;
create table run_totals (
    batch text not null,
    run bigint not null,
    day date not null,
    records bigint not null default 0,
    bytes bigint not null default 0,
    reserved bigint not null default 0,
    reserved_bytes bigint not null default 0,
    expect bigint,
    primary key (batch, run, day)
);
""")
