"""Facts about Forgejo and Gitea."""

from __future__ import annotations

from forges.facts import ForgeFacts

FACTS = {
    "Forgejo, Gitea": ForgeFacts(
        artifacts="rows are kept and marked; the path is stored",
        locks="none",
        sizes="none",
        kept="a row that has changed since it was found",
        other_batches="none",
        flags="forgekeeper's",
        times="seconds since 1970",
        left_to_the_forge="logs of jobs, packages, old branches",
        not_adopted="MySQL, SQLite",
    )
}
