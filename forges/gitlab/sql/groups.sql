-- Each project with the groups that it is in, from the outermost to its own.
create or replace view VIEWS.project_groups as
select project.id as project_id, group_id
from TABLES.projects as project
    join TABLES.namespaces as namespace on namespace.id = project.namespace_id,
    unnest(namespace.traversal_ids) as group_id;
