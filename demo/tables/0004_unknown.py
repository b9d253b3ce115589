"""Allow NULL if a forge does not know an artifact's path or lock, or an import's failure."""

from forgekeeper.platform.migrations import sql

up = sql("""
alter table ci_job_artifacts alter file_final_path drop not null, alter locked drop not null;
alter table bulk_imports alter has_failures drop not null;
alter table bulk_import_entities alter has_failures drop not null;
""")
