"""Signs of a Forgejo or Gitea database, and the advice of `check`."""

from __future__ import annotations

from forgekeeper.platform.database.signs import Forge, known_forges
from forges.adoption_findings import AdoptedForge

FORGEJO = AdoptedForge("forgejo", "Forgejo", marker_function="expire_artifact")

known_forges["forgejo"] = Forge(
    relations=("action_artifact", "action_run"),
    advice=(
        "this is a Forgejo or Gitea database: its cron job cleanup_actions also deletes expired artifacts, all at once;"
        " leave it on, because it also deletes logs: it finds no artifacts while expired_job_artifacts runs"
    ),
    refusing={},
    is_adopted=FORGEJO.is_adopted,
    objections=FORGEJO.report_outdated_views,
    hints=FORGEJO.report_missing_indexes,
)
