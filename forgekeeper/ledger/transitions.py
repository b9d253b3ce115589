"""Guarded changes of a run's row, as SQL: each statement repeats its condition.

The loser of a race gets no row back.
"""

from __future__ import annotations

from forgekeeper.ledger.holds import BATCH_HAS_HOLD

RUN_IS_LOST = "(state = 'started' and alive_at < clock_timestamp() - %(dead_after)s)"
RUN_IS_UNSENT = f"""(
    state in ('claimed', 'enqueued')
    and (enqueued_at is null or enqueued_at <= clock_timestamp() - %(again_after)s)
    and (retry_at is null or retry_at <= clock_timestamp()) and not {BATCH_HAS_HOLD.format("job_runs.batch")}
)"""
INSERT_CLAIM = f"""
    insert into job_runs (batch, tick, state, reason, claimed_by, claimed_at)
    select %(batch)s, %(tick)s, 'claimed', %(reason)s, %(by)s, clock_timestamp()
    where %(tick)s <= clock_timestamp() + %(tolerance)s
      and not {BATCH_HAS_HOLD.format("%(batch)s")}
    on conflict do nothing
    returning id
"""
INSERT_TICKS = """
    insert into job_runs (batch, tick, state, reason, claimed_by, claimed_at, finished_at)
    select %(batch)s, tick, %(state)s, %(reason)s, %(by)s, clock_timestamp(), clock_timestamp()
    from unnest(%(ticks)s::timestamptz[]) as tick
    on conflict (batch, tick) do nothing
"""
REOPEN_LOST_RUNS = f"""
    update job_runs set
        state = case when losses + 1 >= %(max_losses)s then 'failed' else 'enqueued' end,
        reason = case when losses + 1 >= %(max_losses)s then 'poison' else 'worker_lost' end,
        finished_at = case when losses + 1 >= %(max_losses)s then clock_timestamp() end,
        error = 'the worker was lost: ' || coalesce(started_by, 'unknown'),
        losses = losses + 1, failures = failures + 1, retry_at = null, enqueued_at = null
    where batch = %(batch)s and {RUN_IS_LOST}
    returning id, state, started_by, losses
"""
MARK_RUN_SENT = f"""
    update job_runs set state = 'enqueued', enqueued_at = clock_timestamp()
    where batch = %(batch)s and {RUN_IS_UNSENT}
    returning id, batch, token, tick
"""
# A worker that has the message nevertheless has started the run.
MARK_RUN_UNSENT = "update job_runs set enqueued_at = null where id = %(id)s and state = 'enqueued'"
# The result of the last attempt joins the results of earlier attempts, and its error joins theirs.
EARLIER_RESULTS = """
    case when result is null then '{}' else jsonb_build_object(
        'earlier', coalesce(result -> 'earlier', '[]') || jsonb_build_array(result - 'earlier' - 'failures')
    ) end"""
FAILED_ATTEMPTS = """
    case when error is null then '{}' else jsonb_build_object(
        'failures', coalesce(result -> 'failures', '[]') || jsonb_build_array(jsonb_build_object(
            'attempt', attempt, 'worker', started_by, 'started_at', started_at, 'error', error
        ))
    ) end"""
# A run that was sent twice has two messages: the second must not use up the retries of a run that waits.
START_RUN = f"""
    update job_runs set
        state = 'started', attempt = attempt + 1, retry_at = null,
        result = nullif({EARLIER_RESULTS} || {FAILED_ATTEMPTS}, '{{}}'),
        attempt_token = gen_random_uuid(),
        started_by = %(by)s, started_at = clock_timestamp(), alive_at = clock_timestamp()
    where id = %(id)s and batch = %(batch)s and token = %(token)s and state in ('claimed', 'enqueued')
      and (retry_at is null or retry_at <= clock_timestamp())
      and not {BATCH_HAS_HOLD.format("job_runs.batch")}
    returning id, batch, attempt_token::text, attempt, failures, tick
"""
# The results of earlier attempts stay beside the result of the present attempt.
MERGED_RESULT = """
    {}
    || case when result ? 'earlier' then jsonb_build_object('earlier', result -> 'earlier') else '{{}}' end
    || case when result ? 'failures' then jsonb_build_object('failures', result -> 'failures') else '{{}}' end
"""
KEEP_RUNS_ALIVE = f"""
    update job_runs set alive_at = clock_timestamp(), result = coalesce({MERGED_RESULT.format("said.so_far")}, result)
    from unnest(%(ids)s::bigint[], %(tokens)s::uuid[], %(results)s::jsonb[]) as said (run, token, so_far)
    where job_runs.id = said.run and job_runs.attempt_token = said.token and state = 'started'
    returning job_runs.id
"""
CLOSE_RUN = """
    update job_runs set {changes} where id = %(id)s and attempt_token = %(token)s and state = 'started'
    returning state
"""
SET_ENDED = f"result = {MERGED_RESULT.format('%(result)s::jsonb')}, finished_at = clock_timestamp(), error = null"
CLOSE_SUCCEEDED = CLOSE_RUN.format(changes=f"state = 'succeeded', ordinary = %(ordinary)s, {SET_ENDED}")
CLOSE_BLOCKED = CLOSE_RUN.format(changes=f"state = 'blocked', reason = %(reason)s, {SET_ENDED}")
# The run did nothing, so it is a skip.
CLOSE_HELD = CLOSE_RUN.format(changes=f"state = 'skipped', reason = 'held', {SET_ENDED}")
CLOSE_FAILED = CLOSE_RUN.format(
    changes=f"""
        state = case when failures < %(retries)s then 'enqueued' else 'failed' end,
        retry_at = case when failures < %(retries)s then clock_timestamp() + %(delay)s end,
        finished_at = case when failures < %(retries)s then null else clock_timestamp() end,
        failures = failures + 1, reason = 'error', error = %(error)s, enqueued_at = null,
        result = coalesce({MERGED_RESULT.format("%(result)s::jsonb")}, result)
    """
)
# A success resets the count: failures before it are not counted.  One batch in each statement: for a batch without
# rows PostgreSQL reads the table from its end.
SELECT_HEALTH = """
    with good as (
        select id, finished_at from job_runs where batch = %(batch)s and state = 'succeeded' order by id desc limit 1
    ), last as (
        select started_at, finished_at from job_runs
        where batch = %(batch)s and started_at is not null and finished_at is not null
        order by id desc limit 1
    )
    select (select finished_at from last), (select finished_at - started_at from last),
        (select finished_at from good),
        (select coalesce(sum(failures), 0) from job_runs
         where batch = %(batch)s and id > coalesce((select id from good), 0)),
        (select min(started_at) from job_runs where batch = %(batch)s and state = 'started')
"""
