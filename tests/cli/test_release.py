"""`release`, what is held of a new installation, and runs by hand of what is held."""

from forgekeeper.audit.acts import Act
from forgekeeper.batches import BATCHES
from forgekeeper.runs.batch import Batch
from forgekeeper.runs.holds import Hold

NAME = "user_status_cleanup"
DELETING = [name for name in BATCHES if name != "prune"]


def hold():
    Hold.add(NAME, "breaker", by="worker-1:9", reason="it would delete all of them")


def test_a_run_by_hand_of_a_batch_that_is_held_is_a_skip_and_says_why(main, database):
    hold()

    result = main("run", NAME, "--json")

    assert (result.status, result.json) == (
        0,
        {"run": None, "deleted": 0, "batches": 0, "stopped": "drained", "skipped": "held"},
    )
    assert result.stderr.endswith(": it would delete all of them\n")


def test_a_batch_that_is_held_is_not_sent(main, database):
    hold()

    assert main("send", NAME, "--json").json == {"batch": NAME, "run": None, "skipped": "held"}


def test_release_lets_a_held_batch_go_and_says_so(main, database):
    hold()

    result = main("release", NAME, "--reason", "I looked", "--json")

    assert result.json == {"released": [NAME], "were_held": [NAME], "expect": None, "reason": "I looked"}
    assert Hold.why(NAME) is None


def test_release_is_recorded(main, database):
    hold()
    main("release", NAME, "--reason", "I looked", "--expect", "10")

    (act,) = Act.select().where(Act.act == "release")
    assert (act.batch, act.reason, act.before["sentence"], act.after["expect"]) == (
        NAME,
        "I looked",
        "it would delete all of them",
        10,
    )


def test_a_release_remembers_who_it_was(main, database):
    main("release", NAME, "--reason", "I looked", ACTOR="Anna")

    assert Batch.get_by_id(NAME).released_by == "Anna"


def test_release_wants_a_reason(main, database):
    assert main("release", NAME).status == 2
    assert main("release", NAME, "--reason", " ").status == 2


def test_release_wants_batches_or_all(main, database):
    assert main("release", "--reason", "x").status == 2
    assert main("release", NAME, "--all", "--reason", "x").status == 2


def test_what_is_expected_is_the_most_that_the_next_run_deletes(main, database):
    main("seed")
    main("release", NAME, "--reason", "some", "--expect", "150")

    assert main("run", NAME, "--json").json["deleted"] == 150


def test_after_the_first_migrate_what_deletes_is_held(main, settings, new_database, query):
    url = new_database()

    said = main("migrate", DATABASE_URL=url).stdout

    held = {name for (name,) in query(url, "select batch from holds where kind = 'new'")}
    assert held == set(DELETING)
    assert "held, as this is a new installation: user_status_cleanup" in said


def test_seed_lets_go_what_is_held_as_new_but_nothing_else(main, settings, new_database, query):
    url = new_database()
    main("migrate", DATABASE_URL=url)
    query(url, "update holds set kind = 'breaker' where batch = 'stale_imports'")

    main("seed", "--scale", "0", DATABASE_URL=url)

    assert query(url, "select batch from holds") == [("stale_imports",)]


def test_a_later_migrate_holds_nothing(main, settings, new_database, query):
    url = new_database()
    main("migrate", DATABASE_URL=url)
    main("release", "--all", "--reason", "I looked", DATABASE_URL=url)

    main("migrate", DATABASE_URL=url)

    assert query(url, "select batch from holds") == []
