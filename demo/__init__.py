"""The tour of an example forge; no production process imports it.

It has servers, tables, sample data and checks.
"""
