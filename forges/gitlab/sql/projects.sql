-- Repositories of the storage `default`, the one whose folder forgekeeper may be given.
create or replace view VIEWS.projects as
select project.id,
    coalesce(repository.disk_path, '@hashed/' || VIEWS.hashed(project.id)) || '.git' as disk_path
from TABLES.projects as project
    left join TABLES.project_repositories as repository on repository.project_id = project.id
where project.repository_storage = 'default' and (repository.project_id is not null or project.storage_version >= 1);
