"""Sample data as the documents put it in, by the thing that there is more of."""

from workers.expired_job_artifacts.sample import artifacts as job_artifacts
from workers.samples.bulk_imports import add as imports
from workers.samples.user_statuses import add as user_statuses

__all__ = ["imports", "job_artifacts", "user_statuses"]
