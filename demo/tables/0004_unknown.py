"""What a forge may not know of a row: where an artifact's object is, whether it is locked, whether an import failed."""

from forgekeeper.platform.migrations import sql

up = sql("""
alter table ci_job_artifacts alter file_final_path drop not null, alter locked drop not null;
alter table bulk_imports alter has_failures drop not null;
alter table bulk_import_entities alter has_failures drop not null;
""")
