"""Facts about GitLab, and about Gisia, a small forge made from it."""

from __future__ import annotations

from forges.facts import ForgeFacts

FACTS = {
    "GitLab": ForgeFacts(
        artifacts="rows are deleted; the path is stored or computed",
        locks="a column",
        sizes="subtracted by difference",
        kept="projects that are being recounted",
        other_batches="yes",
        flags="its own, read",
        times="with a zone",
        left_to_the_forge="[a list](adopting_gitlab.md#what-you-have-to-do-in-gitlab)",
        not_adopted="artifacts of a GitLab with [two databases](adopting_gitlab.md#two-databases)",
    ),
    "Gisia": ForgeFacts(
        artifacts="the same",
        locks="the lock of the job's pipeline (`ci_job_locks`)",
        sizes="none",
        kept="nobody else deletes",
        other_batches="none",
        flags="forgekeeper's",
        times="UTC without a zone",
        left_to_the_forge="the same",
        not_adopted="its main database",
    ),
}
