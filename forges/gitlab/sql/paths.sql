-- Immutable, so that an index of them can be made.  An index computes what it was made with: whoever changes these
-- functions has to rebuild the indexes that call them.
create or replace function VIEWS.hashed(number bigint) returns text
    language sql immutable strict parallel safe
    return regexp_replace(encode(sha256(number::text::bytea), 'hex'), '^(..)(..)', '\1/\2/\1\2');

create or replace function VIEWS.day(instant timestamptz, form integer) returns text
    language sql immutable strict parallel safe
    return left(
        lpad(extract(year from instant at time zone 'UTC')::text, 4, '0')
            || '_' || lpad(extract(month from instant at time zone 'UTC')::text, 2, '0')
            || '_' || lpad(extract(day from instant at time zone 'UTC')::text, 2, '0'),
        form
    );

-- Where GitLab's uploader puts the file of an artifact that has no path of its own; '' where that is not known, or
-- there is no file.
create or replace function VIEWS.artifact_path(
    project_id bigint, job_id bigint, id bigint, created_at timestamptz,
    file text, file_location smallint, file_type integer
) returns text
    language sql immutable parallel safe
    return coalesce(
        case
            when file in ('', '.', '..') or strpos(file, '/') > 0 then ''
            when file_type <> 3 and file_location = 1 then
                VIEWS.day(created_at, 7) || '/' || project_id::text || '/' || job_id::text || '/' || file
            when file_type = 3 or coalesce(file_location, 2) = 2 then
                VIEWS.hashed(project_id) || '/' || VIEWS.day(created_at, 10)
                    || '/' || job_id::text || '/' || id::text || '/' || file
        end,
        ''
    );
