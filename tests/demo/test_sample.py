"""`up --sample` and `demo --keep`: something to look at, in which more expires each minute."""

import re
import signal
import urllib.request
from functools import partial

import orjson

from tests.harness.ports import free_ports
from tests.harness.thorough import whole_only
from tests.harness.waiting import wait_until

LIMIT = 60.0
BATCHES = ("user_status_cleanup", "git_ref_cleanup", "expired_job_artifacts", "delete_objects", "stale_direct_uploads")
EACH_SECOND = {f"CRON_{name.upper()}": "* * * * * *" for name in BATCHES}


def console_shows(address, text):
    try:
        with urllib.request.urlopen(address, timeout=LIMIT) as answer:
            return text in answer.read().decode()
    except OSError:
        return False


@whole_only
def test_up_with_a_sample_warns_of_nothing_and_the_next_start_goes_on_with_it(start, query, tmp_path_factory):
    (console,), folder = free_ports(1), tmp_path_factory.mktemp("s")  # short, as the path of a socket is
    ask = partial(query, f"postgresql://forgekeeper@/forgekeeper?host={folder}/.forgekeeper/sockets&port=5432")
    for _start in range(2):
        up = start("up", "--sample", folder=folder, CONSOLE_PORT=str(console), POLL_INTERVAL="1", **EACH_SECOND)
        assert up.says("next: open the console"), up.said
        assert wait_until(lambda: console_shows(f"http://127.0.0.1:{console}/", "user_status_cleanup"), LIMIT)

        done = "select 1 from job_runs where batch = '{}' and (result->>'{}')::int > 0"
        for batch, counted in (
            ("user_status_cleanup", "deleted"),
            ("stale_direct_uploads", "total_deleted_stale_entries"),
        ):
            assert wait_until(partial(ask, done.format(batch, counted)), LIMIT)
        assert wait_until(partial(ask, "select 1 from deleted_objects"), LIMIT)

        assert up.ends(signal.SIGINT) == 0
        assert up.leaves_nothing(), up.process_table()
        lines = [orjson.loads(line) for line in up.said.splitlines() if line.startswith("{")]
        # On a timetable of seconds ticks are missed, at the latest between two starts.
        assert {line["message"] for line in lines if line["level"] != "info"} <= {"ticks missed"}


def test_a_sample_is_refused_for_servers_of_one_s_own(start):
    refused = start("up", "--sample", DATABASE_URL="postgresql://h/n", REDIS_URL="redis://h/0")

    assert refused.ends() == 2
    assert refused.said.startswith("forgekeeper: --sample needs embedded servers: unset FORGEKEEPER_DATABASE_URL")


@whole_only
def test_a_demo_that_is_kept_runs_until_it_is_interrupted_and_removes_everything(start):
    demo = start("demo", "--keep")
    assert demo.says("Ctrl-C ends and removes all"), demo.said
    (console,) = re.findall(r"Every figure is as expected\. The console is at (http://\S+);", demo.said)

    assert console_shows(console, "user_status_cleanup")

    assert demo.ends(signal.SIGINT) == 0, demo.said
    assert demo.leaves_nothing(), demo.process_table()


@whole_only
def test_batches_without_their_places_are_off_in_an_up_of_its_own(start, tmp_path):
    up = start("up", folder=tmp_path)

    assert up.says("next: `forgekeeper up --sample`"), up.said
    assert "git_ref_cleanup is off: FORGEKEEPER_REPOSITORIES_ROOT is not set" in up.said
    assert up.ends(signal.SIGINT) == 0
