"""Sample data of the documents, for `seed` and `demo`, and what proves that it was worked off."""

from workers.samples import bulk_imports, user_statuses

__all__ = ["bulk_imports", "user_statuses"]
