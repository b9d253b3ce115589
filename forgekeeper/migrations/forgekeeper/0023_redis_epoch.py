"""Which Redis has the register of a batch: the epoch that lies in both."""

from forgekeeper.migrations import sql

up = sql("alter table batches add column redis_epoch text;")
