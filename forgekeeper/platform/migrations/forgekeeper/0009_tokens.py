"""Tokens that distinguish a run, and an attempt, from another of the same number in a restored database."""

from forgekeeper.platform.migrations import sql

up = sql("""
alter table job_runs add column token uuid not null default gen_random_uuid(), add column attempt_token uuid;
""")
