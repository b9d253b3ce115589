"""The audit: who did what, and what was deleted by which run.  Rows are added here, and never changed."""
