"""What a process that serves says while its servers are not there, and that it begins when they are."""

import socket
import urllib.error
import urllib.request
from contextlib import closing

import pytest
import redis

from tests.harness.ports import free_ports
from tests.harness.programs import Program, eventually
from tests.harness.thorough import whole_only

from ..system.proxy import postgres_through  # noqa: TID252


class Process(Program):
    """`forgekeeper <arguments>`, its lines, and what it has told its supervisor."""

    def __init__(self, folder, environment, *arguments):
        self.supervisor = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.supervisor.bind(str(folder / "notify"))
        self.supervisor.setblocking(False)
        self._environment = environment | {"NOTIFY_SOCKET": str(folder / "notify")}
        super().__init__(folder / "log", "-m", "forgekeeper.cli", *arguments, cwd=folder)

    def environment(self):
        return self._environment

    def waits_for(self, what):
        """Return the last line that says so, None where none does."""
        said = [line for line in self.lines() if line["message"] == "not ready, waiting"]
        return said[-1] if said and said[-1]["missing"] == what else None

    def told(self):
        """Return what the supervisor has been told since it asked last."""
        told = []
        try:
            while True:
                told.append(self.supervisor.recv(4096).decode())
        except BlockingIOError:
            return told

    def kill(self):
        self.supervisor.close()
        super().kill()


@pytest.fixture
def start(environment, settings, tmp_path):
    started = []

    def call(*arguments, **given):
        started.append(Process(tmp_path, environment(LOG_FORMAT="json", **given), *arguments))
        return started[-1]

    yield call
    for one in started:
        one.kill()


def ask(port, path="readyz"):
    """Ask the endpoint; return the status, None if nobody answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=5) as answer:
            return answer.status
    except urllib.error.HTTPError as refused:
        return refused.code
    except OSError:
        return None


@whole_only
def test_a_worker_waits_for_each_thing_that_it_lacks_and_begins_when_all_is_there(start, main, new_database, urls):
    url, (port,) = new_database(), free_ports(1)
    proxy, through = postgres_through(url)
    with proxy, closing(redis.Redis.from_url(urls.redis)) as server:
        proxy.refuse()
        arguments = ("worker", "--processes", "1", "--threads", "1", "--metrics-port", str(port))
        worker = start(*arguments, DATABASE_URL=through)

        eventually(lambda: worker.waits_for("PostgreSQL"))
        line = worker.waits_for("PostgreSQL")
        assert str(proxy.port) in line["where"]
        assert line["reason"].endswith("; check FORGEKEEPER_DATABASE_URL")
        assert 0 < line["next_try_in"] <= 30
        # It tells its supervisor after the log.
        waits = f"STATUS=waiting for PostgreSQL at {line['where']}"
        eventually(lambda: any(waits in told for told in worker.told()))
        # An alert for workers that are down looks whether the metrics are there.
        assert [ask(port, path) for path in ("livez", "readyz", "metrics", "")] == [200, 503, 503, 404]

        proxy.passing()
        eventually(lambda: worker.waits_for("the schema"))
        assert worker.waits_for("the schema")["reason"].endswith("run `forgekeeper migrate`")

        try:
            server.execute_command("REPLICAOF", "127.0.0.1", "1")
            main("migrate", DATABASE_URL=url)
            eventually(lambda: worker.waits_for("Redis"))
            assert "replica" in worker.waits_for("Redis")["reason"]
            assert not any("READY=1" in told for told in worker.told())
        finally:
            server.execute_command("REPLICAOF", "NO", "ONE")

        eventually(lambda: worker.said("worker ready"))
        eventually(lambda: ask(port) == 200)
        eventually(lambda: ask(port, "metrics") == 200)
        assert any("READY=1" in told for told in worker.told())
        assert worker.end() == 0


@whole_only
@pytest.mark.parametrize("command", ["scheduler", "worker", "up"])
def test_a_process_that_waits_for_a_server_that_hangs_ends_when_it_is_told_to(start, urls, command):
    proxy, through = postgres_through(urls.database)
    with proxy:
        # The session is there, and what is asked in it is never answered.
        proxy.drop_replies(to=b"transaction_read_only")
        process = start(command, DATABASE_URL=through)
        eventually(lambda: proxy.dropped)

        assert process.end() == 0
        assert process.said("process stopped before it was ready")
