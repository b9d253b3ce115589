"""The engine: everything that a batch should not have to think about; it knows no batch, table or key of a forge."""
