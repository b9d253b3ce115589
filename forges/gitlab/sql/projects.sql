-- Repositories of the storage `default`, the one whose folder forgekeeper may be given.
create or replace view VIEWS.projects as
select project.id,
    coalesce(repository.disk_path, '@hashed/' || VIEWS.hashed(project.id)) || '.git' as disk_path
from TABLES.projects as project
    left join TABLES.project_repositories as repository on repository.project_id = project.id
where project.repository_storage = 'default' and (repository.project_id is not null or project.storage_version >= 1);

-- Each project with the groups that it is in, from the outermost to its own.
create or replace view VIEWS.project_groups as
select project.id as project_id, group_id
from TABLES.projects as project
    join TABLES.namespaces as namespace on namespace.id = project.namespace_id,
    unnest(namespace.traversal_ids) as group_id;
