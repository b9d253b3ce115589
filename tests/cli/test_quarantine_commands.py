"""What lies in quarantine, from the command line: listed, shown, tried again, discarded, and written down in the audit."""

import json

import pytest

from forgekeeper.audit.acts import Act
from forgekeeper.ledger import quarantine
from forgekeeper.ledger.quarantine import Quarantined
from forgekeeper.platform.connections import client
from forgekeeper.sources.outbox import MAX_OBJECT_ATTEMPTS, DeletedObject
from models import DeletionStatus, GitRefDeletion
from tests.harness.stale_uploads import uploads as register
from tests.harness.thorough import whole_only

STATUS = ("user_status_cleanup", "user_status", "815")
CHILD = ("git_ref_cleanup", "clean_project_refs", "clean_project_refs:7")
ERROR = "InternalError: spoilt"
UPLOAD = "artifacts:folder/a"

pytestmark = pytest.mark.usefixtures("database")


@pytest.fixture
def bad():
    """A record and a child that have failed again and again, and a message that nothing can read."""
    for _ in range(3):
        quarantine.record_failure(*STATUS, ERROR, reason="record_failed")
        quarantine.record_failure(*CHILD, "RepositoryFailed: no HEAD", reason="child_failed", run=5)
    quarantine.record_failure("nobody", "cron", "1-2-3", "no actor is called nobody", reason="unreadable")


@pytest.fixture
def kept():
    """What documents keep themselves: an upload and an object that could not be deleted, a ref that was refused."""
    client.zadd(register.keys.failed, {UPLOAD: 1})
    client.hset(register.keys.attempts, UPLOAD, 5)
    dead = DeletedObject.create(store_dir="b", file="c", attempts=MAX_OBJECT_ATTEMPTS)
    refused = GitRefDeletion.create(project_id=7, ref="refs/x", status=DeletionStatus.REJECTED, reason="moved")
    return {"upload": f"upload:{UPLOAD}", "object": f"object:{dead.id}", "ref": f"ref:{refused.id}"}


def waiting():
    failed = {row: quarantine.find_failed_keys(row.batch, row.record, [row.key]) for row in Quarantined.select()}
    return {row.kind for row, waits in failed.items() if any(waits.values())}


def id_of(main, kind):
    (entry,) = main("quarantine", "list", "--kind", kind, "--json").json["entries"]
    return entry["id"]


def gone(kind):
    if kind == "upload":
        return not client.exists(register.keys.failed, register.keys.attempts, register.keys.deleting)
    return not {"object": DeletedObject, "ref": GitRefDeletion}[kind].select().count()


def tried_again(kind):
    if kind == "upload":
        return client.zscore(register.keys.deleting, UPLOAD) is not None and not client.exists(register.keys.failed)
    if kind == "object":
        return DeletedObject.get().attempts == 0
    return GitRefDeletion.get().status == DeletionStatus.PENDING


@pytest.mark.parametrize("command", [["quarantine"], ["quarantine", "list"]])
def test_all_is_listed_with_its_errors_whoever_keeps_it(main, bad, kept, command):
    result = main(*command)

    said = ("user_status 815", ERROR, CHILD[2], "no actor is called nobody", UPLOAD, "b/c", "moved: refs/x", "6 in all")
    assert result.status == 0
    assert [word for word in said if word not in result.stdout] == []


def test_without_redis_all_else_is_listed_and_what_lies_there_is_named(main, bad):
    result = main("quarantine", "list", "--json", REDIS_URL="redis://127.0.0.1:1/0")

    assert (result.status, len(result.json["entries"]), list(result.json["unknown"])) == (0, 3, ["upload"])


@pytest.mark.parametrize(
    ("words", "kinds"),
    [
        (["--batch", "user_status_cleanup"], {"record"}),
        (["--batch", "git_ref_cleanup"], {"child", "ref"}),
        (["--kind", "object"], {"object"}),
        ([], {"record", "child", "message", "upload", "object", "ref"}),
    ],
)
def test_those_of_a_batch_or_a_kind_are_listed_alone(main, bad, kept, words, kinds):
    entries = {one["kind"]: one for one in main("quarantine", "list", *words, "--json").json["entries"]}

    assert set(entries) == kinds
    assert {kind for kind, one in entries.items() if one["retry_at"]} == kinds & {"record", "child"}


@whole_only
@pytest.mark.parametrize("kind", ["record", "child", "upload", "object", "ref"])
def test_one_is_tried_again_where_it_is_kept(main, bad, kept, kind):
    result = main("quarantine", "retry", id_of(main, kind))

    assert (result.status, result.stdout) == (0, "1 will be retried\n")
    assert tried_again(kind) if kind in kept else waiting() == {"record", "child", "message"} - {kind}


@whole_only
@pytest.mark.parametrize(
    ("kind", "said"), [("record", ERROR), ("upload", UPLOAD), ("object", "object"), ("ref", "ref")]
)
def test_one_is_discarded_where_it_is_kept_and_the_audit_has_who_and_what(main, bad, kept, kind, said):
    number = id_of(main, kind)
    shown = main("quarantine", "show", number, "--json").json

    result = main("quarantine", "discard", number)

    act = Act.select().order_by(Act.id.desc()).first()
    assert (shown["kind"], result.status, result.stdout) == (kind, 0, "1 discarded\n")
    assert gone(kind) if kind in kept else Quarantined.select().count() == 2
    assert (act.act, act.what, said in str(act.before)) == ("quarantine discard", number, True)


def test_all_are_discarded(main, bad, kept):
    answer = main("quarantine", "discard", "--all", "--json").json

    assert (answer, Quarantined.select().count()) == ({"discarded": 6}, 0)
    assert all(map(gone, kept))


def test_the_audit_has_the_number_of_those_that_were_discarded_and_not_of_others(main, kept):
    client.zadd(register.keys.deleting, {"artifacts:tried/again": 2**33})
    client.hset(register.keys.attempts, "artifacts:tried/again", 1)

    answer = main("quarantine", "discard", "--all", "--kind", "upload", "--json").json

    assert (answer, Act.get().before) == ({"discarded": 1}, {"kind": "upload", "count": 1, "first": [UPLOAD]})


@whole_only
@pytest.mark.parametrize("member", [b"artifacts:\xff", b"artifacts:a\x1b[31m\nb"])
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_an_entry_that_is_no_text_can_be_listed(forgekeeper, member, options):
    client.zadd(register.keys.failed, {member: 1})

    result = forgekeeper("quarantine", "list", *options)

    assert (result.status, "\x1b" in result.stdout) == (0, False)


@pytest.mark.parametrize(
    ("member", "reason"),
    [
        ("artifacts:up/a", "the store refused to delete it: the log says why"),
        ("artifacts:down/a", "outside the folders of FORGEKEEPER_OBJECT_PREFIXES"),
        ("nowhere:a", "no store is configured for its location"),
        ("artifacts:a//b", "it names no object"),
    ],
)
def test_an_upload_is_listed_with_what_the_settings_say_of_it(main, tmp_path, member, reason):
    client.zadd(register.keys.failed, {member: 1})
    stores = {
        "OBJECT_STORES": json.dumps({"artifacts": f"file://{tmp_path}"}),
        "OBJECT_PREFIXES": '{"artifacts": ["up"]}',
    }

    answer = main("quarantine", "list", "--kind", "upload", "--json", **stores)

    assert [entry["error"] for entry in answer.json["entries"]] == [reason]


@pytest.mark.parametrize("number", ["4711", "upload:artifacts:no", "object:4711", "ref:x"])
def test_what_does_not_lie_there_is_named(main, bad, kept, number):
    result = main("quarantine", "retry", number)

    assert (result.status, result.complaint) == (
        1,
        f"{number} is not in quarantine; `forgekeeper quarantine` lists the entries",
    )
    assert Act.select().count() == 0


def test_what_lies_there_and_stays_as_it_is_is_not_said_to_be_missing(main, bad):
    client.zadd(register.keys.deleting, {UPLOAD: 2**33})
    client.hset(register.keys.attempts, UPLOAD, 1)

    retried, discarded = (
        main("quarantine", "retry", id_of(main, "message")),
        main("quarantine", "discard", f"upload:{UPLOAD}"),
    )

    assert (retried.status, "it cannot be read" in retried.stderr) == (1, True)
    assert (discarded.status, "it is retried automatically" in discarded.stderr) == (1, True)
