"""`resume`: one ends one's own pauses and stops, and another person's by name or number."""

import pytest

from forgekeeper.batches import BATCHES
from forgekeeper.runs.holds import Hold

NAME = "user_status_cleanup"
ME = "ops"
OTHER = "prune"


def hold():
    """Return the one thing that holds a batch back."""
    (found,) = Hold.standing()
    return found


def stopped():
    return {hold.batch for hold in Hold.standing("stop")}


def paused():
    return {hold.batch for hold in Hold.standing("pause")}


def test_resume_ends_a_pause(forgekeeper, database):
    forgekeeper("pause", NAME)

    result = forgekeeper("resume", NAME)

    assert (result.status, result.stdout) == (0, f"{NAME} runs again from its next tick\n")
    assert paused() == set()


def test_resume_ends_a_stop(main, database):
    Hold.add(NAME, "stop", reason="wrong rows go", by=ME)

    result = main("resume", NAME, "--reason", "they were right", ACTOR=ME)

    assert (result.stdout, stopped()) == (f"{NAME} runs again from its next tick\n", set())


def test_resume_of_all_ends_every_pause_and_stop_of_ones_own(main, database):
    Hold.add(NAME, "stop", reason="wrong rows go", by=ME)
    Hold.add(OTHER, "pause", until=None, reason=None, by=ME)

    result = main("resume", "--all", ACTOR=ME)

    assert (result.status, stopped(), paused()) == (0, set(), set())


def test_resume_says_that_there_was_no_pause(main, database):
    result = main("resume", NAME)

    assert (result.status, result.stdout) == (0, f"{NAME} was not paused\n")


def test_resume_lets_no_held_batch_go_and_names_what_does(main, database):
    Hold.add(NAME, "breaker", by="worker-1:9", reason="90 % would go")

    result = main("resume", NAME)

    assert result.stdout == f"{NAME} is held: `forgekeeper release {NAME} --reason ...` lets it go\n"
    assert Hold.why(NAME) == "held"


def test_resume_with_json_says_what_there_was(main, database):
    main("pause", NAME)

    answers = [main("resume", NAME, "--json").json for _ in range(2)]

    ended = [[one.pop(key) for key in ("ended", "left")] for one in answers]
    assert [(len(mine), others) for mine, others in ended] == [(1, []), (0, [])]
    assert answers == [
        {"batch": NAME, "paused": False, "stopped": False, "was_paused": was, "was_stopped": False, "held": False}
        for was in (True, False)
    ]


# Of different people


def test_a_pause_does_not_shorten_that_of_somebody_else(main, database):
    main("pause", "--all", "--forever", "--reason", "legal hold", ACTOR="ann")
    main("pause", "--all", "--until", "+1h", "--reason", "a move", ACTOR="bob")

    found = {(hold.by, hold.until is None) for hold in Hold.standing(batch=NAME)}
    assert found == {("ann", True), ("bob", False)}


def test_resume_ends_ones_own_and_names_what_stays_and_how_to_end_it(main, database):
    main("pause", NAME, "--reason", "legal hold", ACTOR="ann")
    main("pause", NAME, "--until", "+1h", "--reason", "a move", ACTOR="bob")

    result = main("resume", NAME, ACTOR="bob")

    stays = hold()
    assert (result.status, stays.by) == (3, "ann")
    assert result.stdout == (
        f"{NAME} is still paused: the pause of ann since {stays.since:%Y-%m-%d %H:%M:%S} (legal hold);"
        f" `forgekeeper resume {NAME} --id {stays.id}` ends it\n"
    )


def test_resume_of_all_leaves_what_others_hold(main, database):
    main("stop", "--all", "--reason", "legal hold", "--no-wait", ACTOR="ann")

    result = main("resume", "--all", ACTOR="bob")

    assert (result.status, stopped()) == (3, set(BATCHES))


def test_with_json_resume_says_what_has_ended_and_what_stays(main, database):
    main("pause", NAME, "--reason", "legal hold", ACTOR="ann")
    main("stop", NAME, "--reason", "wrong rows go", "--no-wait", ACTOR="bob")

    answer = main("resume", NAME, "--json", ACTOR="bob").json

    assert (answer["paused"], answer["stopped"]) == (True, False)
    assert [[(one["kind"], one["by"]) for one in answer[key]] for key in ("ended", "left")] == [
        [("stop", "bob")],
        [("pause", "ann")],
    ]


@pytest.mark.parametrize("named", [lambda: ("--by", "ann"), lambda: ("--id", str(hold().id))], ids=["by", "id"])
def test_what_somebody_else_holds_ends_by_its_name_and_it_is_said_whose_it_was(main, database, named):
    main("pause", NAME, "--reason", "legal hold", ACTOR="ann")
    since = hold().since

    result = main("resume", NAME, *named(), ACTOR="bob")

    assert result.stdout.splitlines() == [
        f"{NAME}: ended the pause of ann since {since:%Y-%m-%d %H:%M:%S} (legal hold)",
        f"{NAME} runs again from its next tick",
    ]


def test_a_hold_that_is_ended_by_its_number_is_one_alone(main, database):
    main("pause", NAME, "--reason", "legal hold", ACTOR="ann")
    number = hold().id
    main("pause", NAME, "--reason", "a move", ACTOR="bob")

    main("resume", NAME, "--id", str(number), ACTOR="bob")

    assert hold().by == "bob"


def test_a_number_that_nothing_has_is_refused(main, database):
    result = main("resume", NAME, "--id", "7")

    assert (result.status, result.complaint) == (
        1,
        "nothing holds a batch back that has number 7; `forgekeeper status --json` has them",
    )
