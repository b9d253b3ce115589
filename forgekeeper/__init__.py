"""The engine: everything that a batch should not have to think about.

It knows no batch, no table and no key of a forge by name.
"""
