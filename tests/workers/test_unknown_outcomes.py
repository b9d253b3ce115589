"""If git or a store does not say whether it has deleted something, the audit leaves that open, and limits count it."""

import pytest

from forgekeeper.ledger.limits import RunTotal
from forgekeeper.platform.database import now
from forgekeeper.sources.outbox import DeletedObject
from forgekeeper.targets.git_repository import RepositoryFailed
from forgekeeper.targets.objects import StoreUnavailable
from tests.harness.audited import count_open_intents, list_audit_lines
from tests.harness.git_samples import replace_git
from tests.harness.performing import perform
from tests.harness.ref_deletions import rows
from tests.harness.settings import settings_with
from workers.delete_objects import delete_objects

pytestmark = pytest.mark.usefixtures("database")
DIES = 'case "$*" in *update-ref*) kill -9 $$;; esac; exec $GIT "$@"'
SAYS_NOTHING = "exit 128"


def test_a_ref_whose_outcome_git_did_not_say_stays_open_in_the_audit_and_used_up_of_the_limit(
    child, repository, tmp_path, monkeypatch
):
    repository.leave_format_to_git()
    rows("refs/mr/1", "refs/mr/2")
    limit = {"max_per_day_git_ref_cleanup": 10}

    for number, script in enumerate((DIES, SAYS_NOTHING)):
        with monkeypatch.context() as patched:
            replace_git(tmp_path / str(number), patched, script)
            with pytest.raises(RepositoryFailed):
                child(**limit)

    assert (
        count_open_intents(),
        list_audit_lines("git_ref_deletion"),
        [total.reserved for total in RunTotal.select()],
    ) == (1, [], [2])
    child(**limit)
    assert (count_open_intents(), [(total.records, total.reserved) for total in RunTotal.select()]) == (0, [(2, 2)])


def test_an_object_whose_outcome_the_store_did_not_say_stays_open_in_the_audit_and_used_up_of_the_limit(s3):
    s3.put("a", "b")
    DeletedObject.insert_many([{"store_dir": "", "file": path, "pick_up_at": now()} for path in "ab"]).execute()
    # Without it, no answer is believed.
    s3.proxy.before("bulk", 1, s3.remove_sentinel)

    with pytest.raises(StoreUnavailable):
        perform(
            delete_objects,
            settings=settings_with(object_stores={"artifacts": s3.url}, max_per_day_delete_objects=10),
            number=17,
        )

    assert (
        count_open_intents(),
        list_audit_lines("deleted_object"),
        [total.reserved for total in RunTotal.select()],
    ) == (1, [], [2])
