"""Sample data as the documents put it in, by the thing that there is more of."""

from demo.sample_data import add_artifacts as job_artifacts
from demo.sample_data import add_imports as imports
from demo.sample_data import add_statuses as user_statuses

__all__ = ["imports", "job_artifacts", "user_statuses"]
