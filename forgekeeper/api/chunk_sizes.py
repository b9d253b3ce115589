"""The number of records that a run deletes in one chunk, unless a batch declares another (`chunk=`)."""

ROWS_PER_CHUNK = 100
"""Rows that one statement deletes: the batch size of the documents."""
OBJECTS_PER_CHUNK = 1_000
"""Objects that one request deletes: the maximum of S3's DeleteObjects."""
OLD_RECORDS_PER_CHUNK = 1_000
"""Old records of forgekeeper's own tables that one statement deletes."""
