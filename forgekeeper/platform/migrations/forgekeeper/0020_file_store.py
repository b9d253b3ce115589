"""`file_store` says where an object lies: 2 at the location `artifacts`, where all were looked for so far."""

from forgekeeper.platform.migrations import sql

up = sql("""
alter table deleted_objects alter file_store set default 2;
update deleted_objects set file_store = 2 where file_store = 1;
""")
