"""The failpoints of the engine and of the batches, by name and step."""

STEPS = {
    "run": ("closed",),
    "tick": ("claimed", "sent"),
    "user_status_cleanup": ("deleted",),
    "git_ref_cleanup": ("enqueued",),
    "clean_project_refs": ("deleted", "settled"),
    "stale_direct_uploads": ("claimed", "marked", "deleted", "settled"),
    "stale_imports": ("changed",),
    "expired_job_artifacts": ("enqueued",),
    "delete_artifact_bucket": ("claimed", "deleted", "finished"),
    "delete_objects": ("claimed", "deleted", "settled"),
    "prune": ("deleted",),
}


def failpoints():
    """Return the names of all failpoints."""
    return [f"{name}.{step}" for name, steps in STEPS.items() for step in steps]
