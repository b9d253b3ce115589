"""The ledger in PostgreSQL: ticks, runs, holds, retries, heartbeats, totals, quarantine."""
