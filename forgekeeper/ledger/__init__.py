"""The ledger: ticks, runs, holds, retries, heartbeats, totals and quarantine, in PostgreSQL."""
