-- Forgejo's and Gitea's table of artifacts, and tables by which `adopt` recognizes such a forge.
create table repository (id bigserial primary key, owner_id bigint, lower_name varchar(255) not null);
create table action_run (id bigserial primary key, repo_id bigint, status integer);
create table action_artifact (
    id bigserial primary key, run_id bigint, runner_id bigint, repo_id bigint, owner_id bigint, commit_sha varchar(255),
    storage_path varchar(255), file_size bigint, file_compressed_size bigint, content_encoding varchar(255),
    artifact_path varchar(255), artifact_name varchar(255), status bigint, created_unix bigint, updated_unix bigint,
    expired_unix bigint
);
create unique index on action_artifact (run_id, artifact_path, artifact_name);
create index on action_artifact (status);
create index on action_artifact (expired_unix);
-- Some rows of each status have expired; every second pending row has changed within the last day.
insert into action_artifact (
    run_id, runner_id, repo_id, owner_id, commit_sha, storage_path, file_size, file_compressed_size, content_encoding,
    artifact_path, artifact_name, status, created_unix, updated_unix, expired_unix
)
select n, 1, 1 + mod(n, 9), 1, md5(n::text),
    case when status in (1, 3) then '' else format('%s/%s/%s.chunk.gz', mod(n, 255), mod(7 * n, 255), 1000 + n) end,
    10 * n, n, 'gzip', 'a' || n, 'artifact-' || n, status, day - 90 * 86400,
    case when mod(n, 2) = 0 then day - 3 * 86400 else day - 3600 end,
    case when mod(n, 4) < 2 then day - 60 else day + 60 end
from generate_series(1, 600) as n,
    lateral (select (array[1, 2, 2, 3, 4, 5, 6])[1 + mod(n, 7)] as status,
        floor(extract(epoch from now()))::bigint as day) as facts;
