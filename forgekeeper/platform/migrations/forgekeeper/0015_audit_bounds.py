"""Workers make the audit's months a year ahead, and drop those that the owner of the tables keeps no more."""

from forgekeeper.platform.migrations import sql

up = sql("""
alter table installation add column audit_keep integer;
-- Those who may write to the audit may have partitions made and old ones dropped, without owning them.
create or replace function audit_partitions(until timestamptz) returns void
language plpgsql security definer set search_path = {schema}, pg_temp as $$
declare
    last timestamptz := least(until, clock_timestamp() + interval '1 year');
    parent text;
    month timestamp;
    part text;
begin
    if not has_table_privilege(session_user, 'audit_deletions', 'insert') then
        raise insufficient_privilege using message = 'only who may write to the audit may have partitions made';
    end if;
    foreach parent in array array['audit_acts', 'audit_deletions'] loop
        month := date_trunc('month', clock_timestamp() at time zone 'UTC');
        while month at time zone 'UTC' <= last loop
            part := parent || to_char(month, '_YYYY_MM');
            if to_regclass(part) is null then
                begin
                    execute format('create table %I partition of %I for values from (%L) to (%L)', part, parent,
                        month at time zone 'UTC', (month + interval '1 month') at time zone 'UTC');
                    execute format('create trigger audit_refuse_truncate before truncate on %I'
                        ' for each statement execute function audit_refuse()', part);
                exception when check_violation then
                    -- The clock was once there: that month stays where its first rows are.
                    null;
                end;
            end if;
            month := month + interval '1 month';
        end loop;
    end loop;
end $$;
-- A year at a time: each part takes a lock for itself and for each of its indexes.
create or replace function audit_drop(horizon timestamptz) returns integer
language plpgsql security definer set search_path = {schema}, pg_temp as $$
declare
    keep integer := coalesce((select audit_keep from installation), 400);
    last timestamptz := least(horizon, clock_timestamp() - make_interval(days => keep));
    part text;
    dropped integer := 0;
begin
    if not has_table_privilege(session_user, 'audit_deletions', 'insert') then
        raise insufficient_privilege using message = 'only who may write to the audit may have partitions dropped';
    end if;
    if horizon > clock_timestamp() - interval '30 days' then
        raise insufficient_privilege using message = 'the audit of the last thirty days stays';
    end if;
    for part in
        select inhrelid::regclass::text from pg_inherits
        where inhparent in ('audit_acts'::regclass, 'audit_deletions'::regclass)
          and inhrelid::regclass::text ~ '_[0-9]{4}_[0-9]{2}$'
          and (to_date(right(inhrelid::regclass::text, 7), 'YYYY_MM') + interval '1 month') at time zone 'UTC'
            <= last
        order by right(inhrelid::regclass::text, 7), 1
        limit 24
    loop
        execute format('drop table %s', part);
        dropped := dropped + 1;
    end loop;
    return dropped;
end $$;
select audit_partitions(clock_timestamp() + interval '1 year');
""")
