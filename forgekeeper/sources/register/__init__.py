"""Registers: uploads that have begun and not completed, in Redis, with the scripts that claim and settle them."""
