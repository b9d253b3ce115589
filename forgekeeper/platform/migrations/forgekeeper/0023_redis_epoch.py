"""Add the epoch, by which a batch recognizes the Redis that has its register."""

from forgekeeper.platform.migrations import sql

up = sql("alter table batches add column redis_epoch text;")
