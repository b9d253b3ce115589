"""What commands, warnings and the exporter's excuses say of a batch that is stopped or held, or whose run was cut short."""

from datetime import timedelta

import pytest

from forgekeeper.boot import load
from forgekeeper.database import now
from forgekeeper.delivery.sending import deliver
from forgekeeper.runs import held_back, reconcile
from forgekeeper.runs.batch import Batch
from forgekeeper.runs.holds import Hold
from forgekeeper.runs.ledger import JobRun

NAME = "user_status_cleanup"
MINUTE = timedelta(minutes=1)


@pytest.fixture
def story(main, database):
    """Ask why, and return the answer's lines."""

    def ask(*words):
        return main("why", *(words or (NAME,))).stdout.splitlines()

    return ask


def stop():
    Hold.add(NAME, "stop", reason="wrong rows go", by="alice@host")


def hold():
    Hold.add(NAME, "breaker", by="worker-1:9", reason="90 % of the table would go")


def one_run(result):
    run = JobRun.start_here(NAME, by="worker-1:9")
    JobRun.succeed(run, result)
    return run


def reconciled():
    reconcile.reconcile(NAME, load(), deliver, by="sched-1:7")


def due_again():
    """Let ticks have been due since the batch was known."""
    Batch.register([NAME])
    Batch.update(registered_at=now() - 3 * MINUTE).where(Batch.name == NAME).execute()


# status


def test_status_shows_who_stopped_a_batch_since_when_and_why(main, database):
    stop()

    stopped = main("status", "--json").json["batches"][NAME]["stopped"]

    assert stopped.pop("since")
    assert stopped == {"reason": "wrong rows go", "by": "alice@host"}


def test_status_lists_all_that_holds_a_batch_back_with_its_number(main, database):
    stop()
    Hold.add(NAME, "pause", reason="legal hold", by="bob")

    holds = main("status", "--json").json["batches"][NAME]["holds"]

    assert [(one["kind"], one["by"], one["until"]) for one in holds] == [
        ("stop", "alice@host", None),
        ("pause", "bob", None),
    ]
    assert [one["id"] for one in holds] == [hold.id for hold in Hold.standing()]


@pytest.mark.parametrize(("hold_back", "word"), [(stop, "stopped"), (hold, "held")], ids=["stopped", "held"])
def test_status_tells_a_person_that_a_batch_is_held_back(main, database, hold_back, word):
    hold_back()

    (row,) = [
        line for line in main("status").stdout.splitlines() if line.strip().startswith(NAME) and word in line.split()
    ]

    assert row


def test_status_begins_with_what_is_stopped_and_how_to_end_that(main, database):
    stop()

    warning = main("status").stdout

    assert f"warning: {NAME} is stopped by alice@host since " in warning
    assert f"(wrong rows go): `forgekeeper resume {NAME}` ends that" in warning


# warnings


@pytest.mark.parametrize("hold_back", [stop, hold])
def test_nothing_is_expected_of_what_is_stopped_or_held(database, settings, hold_back):
    hold_back()

    assert NAME in held_back.idle(settings)


# why


@pytest.mark.parametrize(
    ("hold_back", "said"),
    [
        (stop, "It was skipped, because the batch was stopped."),
        (hold, "It was skipped, because the batch was held."),
    ],
    ids=["stopped", "held"],
)
def test_a_tick_that_was_due_meanwhile_says_why_it_did_not_run(story, hold_back, said):
    due_again()
    hold_back()

    reconciled()

    assert JobRun.of(NAME).first().state == "skipped"
    assert said in story()


def test_a_run_that_waits_while_its_batch_is_stopped_says_so(story):
    JobRun.claim_manual(NAME, by="ops:1")
    stop()

    told = story()[-1]

    assert told.startswith("The batch is stopped by alice@host since ")
    assert told.endswith(f"(wrong rows go): nothing starts until `forgekeeper resume {NAME}`.")


@pytest.mark.parametrize(
    ("braked", "because"),
    [
        ("stopped", "because the batch was stopped"),
        ("held", "because the batch was held"),
        ("cancelled", "because the run was cancelled"),
        ("max_per_run", "because it had deleted as much as one run may (MAX_PER_RUN)"),
        ("max_per_day", "because the runs of the day had deleted as much as they may (MAX_PER_DAY)"),
    ],
)
def test_a_run_that_was_cut_short_says_why(story, braked, because):
    one_run({"deleted": 100, "stopped": braked, "braked": braked})

    (told,) = [line for line in story() if "before its work was done" in line]

    assert because in told
    assert "deleted=100" in told


@pytest.mark.parametrize("skipped", ["stopped", "held", "cancelled"])
def test_a_run_that_came_too_late_says_that_it_did_nothing(story, skipped):
    one_run({"deleted": 0, "skipped": skipped})

    assert [line for line in story() if line.startswith("It did nothing, because ")]


def test_a_run_that_held_its_batch_has_the_sentence_with_the_numbers(story):
    run = JobRun.start_here(NAME, by="worker-1:9")
    sentence = "900 of 1,000 statuses would go"
    JobRun.hold(run, {"skipped": "held", "held": sentence}, kind="breaker", sentence=sentence)

    told = story()

    assert f"A brake has held it back: {sentence}." in told
    assert told[-1].startswith("The batch is held since ")


def test_a_cancelled_run_says_by_whom_and_why(story):
    number = JobRun.claim_manual(NAME, by="ops:1")
    JobRun.cancel(number, reason="not now", by="alice@host")

    told = story(str(number))

    assert "It was cancelled while it waited, and did not run." in told
    assert told[-1].startswith("It was cancelled by alice@host at ")
    assert told[-1].endswith(" (not now).")
