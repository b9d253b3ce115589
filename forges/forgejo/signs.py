"""Signs of a Forgejo or Gitea database, and the advice of `check`."""

from __future__ import annotations

from forgekeeper.platform.database.signs import FORGES, Forge
from forges.adopted import AdoptedForge

FORGEJO = AdoptedForge("forgejo", "Forgejo", function="expire_artifact")

FORGES["forgejo"] = Forge(
    relations=("action_artifact", "action_run"),
    advice=(
        "this is a database of Forgejo or Gitea: its cron job cleanup_actions deletes expired artifacts, too, all at"
        " once; leave it on, as it also deletes logs: it finds nothing while expired_job_artifacts runs"
    ),
    refusing={},
    is_adopted=FORGEJO.is_adopted,
    objections=FORGEJO.say_outdated,
    hints=FORGEJO.say_slow,
)
