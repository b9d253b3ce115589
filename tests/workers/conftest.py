import pytest

from forgekeeper.targets import sentinel, stores
from tests.harness.adopted_for_models import over_views, views_for_models  # noqa: F401
from tests.harness.clocks import jump  # noqa: F401
from tests.harness.installation import INSTALLATION
from tests.harness.ref_deletions import child, clean, configured, parent, repository, root, small_limits  # noqa: F401
from tests.harness.stores import Folder, empty_s3, folder, moto, objects, s3, s3_client, store  # noqa: F401
from tests.harness.thorough import RUNS_WHOLE_SUITE

FIVE = {
    *("user_status_cleanup", "expired_job_artifacts", "git_ref_children", "git_ref_fan_out", "stale_imports"),
    "suspended_git_children",
}
"""Test modules that also run on views of GitLab's tables."""
OF_TABLES = {
    "test_with_stale_statistics_a_run_reads_what_it_deletes_and_no_more",
    "test_locked_rows_make_a_run_neither_wait_nor_search_again_and_again",
    "test_a_batch_reads_no_more_than_it_destroys_whatever_postgresql_knows",
    "test_a_run_after_a_crash_ends_as_if_there_had_been_none",
    "test_a_status_that_is_extended_while_a_chunk_is_deleted_stays",
}
"""Tests that need properties of a table: ctid, constraints, statistics and counters of PostgreSQL."""
ALWAYS = {
    "test_a_run_takes_as_many_batches_as_it_needs",
    "test_a_locked_an_unknown_a_trace_and_an_unexpired_artifact_are_never_destroyed",
    "test_artifacts_whose_statistics_are_locked_wait_and_no_others_do",
    "test_a_ref_that_has_moved_from_its_expected_oid_stays_and_its_row_says_so",
    "test_a_push_wins_though_no_value_was_expected_and_the_next_child_rejects_the_row_as_moved",
    "test_a_run_goes_round_once_and_no_further",
    "test_an_import_that_is_timed_out_has_the_failures_of_its_entities",
    "test_a_tracker_that_finishes_while_its_entity_is_waited_for_stays_finished",
}
"""Tests that always run on views, too; the others do so only in the whole suite."""


def pytest_generate_tests(metafunc):
    """Run the tests of the five documents on the example forge's tables, and on views of GitLab's tables."""
    if metafunc.module.__name__.rpartition(".test_")[2] in FIVE:
        name = metafunc.function.__name__
        views = ["views"] if name in ALWAYS or (RUNS_WHOLE_SUITE and name not in OF_TABLES) else []
        metafunc.parametrize("forge", ["tables", *views], indirect=True)


@pytest.fixture(autouse=True)
def forge(request):
    """Choose the tables of the test: the example forge's, or views of GitLab's."""
    if getattr(request, "param", "tables") == "views":
        request.getfixturevalue("over_views")


@pytest.fixture
def elsewhere(tmp_path):
    """A second store in a folder, for the location `lfs`."""
    elsewhere = Folder(tmp_path / "other")
    sentinel.Store("lfs", elsewhere.url).create_sentinel(INSTALLATION)
    return elsewhere


@pytest.fixture(autouse=True)
def restarted():
    """Forget open stores, so that each test behaves like a new process."""
    stores.open_object_store.cache_clear()
    yield
    stores.open_object_store.cache_clear()
