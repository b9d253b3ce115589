"""Registers of incomplete uploads in Redis, with scripts that claim and settle entries."""
