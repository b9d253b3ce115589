"""Parts of a GitLab: the tables and columns that the views of each part read."""

from __future__ import annotations

from forges.parts import AdoptedPart

ARTIFACTS_PLACEHOLDER = "ARTIFACTS"
"""Placeholder for the table of all artifacts, whose name depends on the version."""
GITLAB_PARTS = (
    AdoptedPart(
        "user_statuses",
        ["user_statuses"],
        {"user_statuses": "user_id emoji message message_html availability clear_status_at"},
    ),
    AdoptedPart(
        "artifacts",
        ["ci_job_artifacts", "ci_pathless_artifacts"],
        {
            ARTIFACTS_PLACEHOLDER: "id project_id job_id file_type file_store file file_final_path file_location size"
            " expire_at locked created_at updated_at"
        },
        also_changes=["project_statistics", "project_build_artifacts_size_refreshes", "ci_deleted_objects"],
    ),
    AdoptedPart(
        "statistics",
        ["project_statistics"],
        {"project_statistics": "project_id build_artifacts_size storage_size"},
        also_changes=[ARTIFACTS_PLACEHOLDER],
    ),
    AdoptedPart(
        "refreshes",
        ["project_build_artifacts_size_refreshes"],
        {"project_build_artifacts_size_refreshes": "id project_id state created_at updated_at"},
    ),
    AdoptedPart(
        "projects",
        ["projects"],
        {"projects": "id repository_storage storage_version", "project_repositories": "project_id disk_path"},
    ),
    AdoptedPart("groups", ["project_groups"], {"projects": "id namespace_id", "namespaces": "id traversal_ids"}),
    AdoptedPart(
        "ref_deletions",
        ["batched_git_ref_updates_deletions"],
        {
            "p_batched_git_ref_updates_deletions": "id project_id partition_id ref status created_at updated_at",
            "projects": "id repository_storage storage_version",
            "project_repositories": "project_id",
        },
    ),
    AdoptedPart(
        "imports",
        ["bulk_imports", "bulk_import_entities", "bulk_import_trackers"],
        {
            "bulk_imports": "id user_id source_type status created_at updated_at",
            "bulk_import_entities": "id bulk_import_id parent_id source_type source_full_path destination_name"
            " destination_namespace status created_at updated_at",
            "bulk_import_trackers": "id bulk_import_entity_id relation stage status created_at updated_at",
            "bulk_import_failures": "bulk_import_entity_id",
        },
    ),
    # Gisia, a small fork of GitLab, stores no lock in the artifact itself.
    AdoptedPart(
        "job_locks",
        ["ci_job_locks"],
        {"ci_builds": "id commit_id", "ci_pipelines": "id locked"},
        unless_table="p_ci_builds",
    ),
    AdoptedPart("flags", ["forge_flags"], {"features": "key", "feature_gates": "feature_key key value"}),
    AdoptedPart(
        "outbox",
        ["ci_deleted_objects"],
        {"ci_deleted_objects": "file_store store_dir file pick_up_at", ARTIFACTS_PLACEHOLDER: "id"},
    ),
)
"""All parts, in order of creation."""
