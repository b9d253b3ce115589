"""Runs as a worker starts them: by their number, and the token that their message has."""

from forgekeeper.runs.ledger import JobRun


def start_run(batch, run_id, *, by="worker"):
    row = JobRun.get_or_none(JobRun.id == run_id)
    return row and JobRun.start(batch, run_id, token=row.token, by=by)
