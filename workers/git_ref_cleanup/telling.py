"""What the audit is told of refs: what they were before they go, and what has become of them (batch 58)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from forgekeeper.audit.deletions import Audit
from forgekeeper.audit.intents import Intended, Item, close_earlier
from forgekeeper.storage import git_values
from forgekeeper.storage.git_refs import Doomed
from workers.git_ref_cleanup.deletions import Pending

RECORD = "git_ref_deletion"


def told_of(audit: Audit, project_id: int) -> Intended[int]:
    """Return what is told of the project's refs, by the ids of their rows."""
    return Intended(audit, RECORD, scope=str(project_id), project_id=project_id)


def tell(told: Intended[int], rows: Sequence[Pending], going: Mapping[Doomed, str]) -> None:
    """Tell what stands to go: of each ref what it is at, and since when it is due."""
    told.begin(
        {
            row.id: Item(row.id, row.ref, {"ref": row.ref, "oid": was, "due": row.created_at})
            for row in rows
            if (was := going.get(Doomed(row.ref, row.expected_oid))) is not None
        }
    )


def close_interrupted(audit: Audit, project_id: int, root: Path, disk_path: str, *, until: float) -> None:
    """Say what has become of refs that attempts before ours were at: what is not there any more was deleted.

    The caller has the project's lease.  Raises what `git_values.standing` raises.
    """
    look = partial(_look, root, disk_path, until)
    close_earlier(audit, RECORD, look, name="ref", scope=str(project_id))


def _look(root: Path, disk_path: str, until: float, rows: Sequence[Mapping[str, Any]]) -> list[str | None]:
    there = git_values.standing(root, disk_path, [row["ref"] for row in rows], until=until)
    return [_became(row["oid"], there.get(row["ref"])) for row in rows]


def _became(was: str, now: str | None) -> str:
    if now is None:
        return "deleted"
    return "kept" if now == was else "moved"
