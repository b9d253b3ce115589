"""A bare Dramatiq actor that deletes the pending refs of a project, without any promise.

`python -m benchmarks.bare_refs REDIS DATABASE ROOT`, with Dramatiq's arguments, is its worker.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from threading import local

import dramatiq
import psycopg2
from dramatiq.brokers.redis import RedisBroker
from dramatiq.cli import main, make_argument_parser

SELECT = """
    select queued.id, ref, disk_path from batched_git_ref_updates_deletions as queued
    join projects on projects.id = project_id
    where project_id = %s and status = 1
"""
CLOSE = "update batched_git_ref_updates_deletions set status = 2, processed_at = now() where id = any(%s)"


def declare(redis_url: str, database_url: str, root: Path) -> dramatiq.Actor[[int], None]:
    """Declare the actor; each thread of its worker has a connection."""
    broker = RedisBroker(url=redis_url)
    dramatiq.set_broker(broker)
    connections = local()

    def delete_project_refs(project: int) -> None:
        """Select the refs, delete them by one git, update their rows."""
        if not hasattr(connections, "mine"):
            connections.mine = psycopg2.connect(database_url)
            connections.mine.autocommit = True
        with connections.mine.cursor() as cursor:
            cursor.execute(SELECT, (project,))
            rows = cursor.fetchall()
            commands = "".join(f"delete {ref}\n" for _, ref, _ in rows)
            command = ["git", f"--git-dir={root / rows[0][2]}", "update-ref", "--stdin"]
            subprocess.run(command, input=commands, text=True, check=True)
            cursor.execute(CLOSE, ([number for number, _, _ in rows],))

    return dramatiq.actor(actor_name="delete_project_refs", broker=broker)(delete_project_refs)


if __name__ == "__main__":
    REDIS_URL, DATABASE_URL, ROOT, *REST = sys.argv[1:]
    declare(REDIS_URL, DATABASE_URL, Path(ROOT))
    sys.exit(main(make_argument_parser().parse_args(["benchmarks.bare_refs", "--skip-logging", *REST])))
