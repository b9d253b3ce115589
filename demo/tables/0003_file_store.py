"""Store the objects of sample artifacts at the location `artifacts`."""

from forgekeeper.platform.migrations import sql

up = sql("""
alter table ci_job_artifacts alter file_store set default 2;
update ci_job_artifacts set file_store = 2 where file_store = 1;
""")
