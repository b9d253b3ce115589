"""What a process that serves says while its servers are not there, and that it begins when they are."""

import urllib.error
import urllib.request
from contextlib import closing

import pytest
import redis

from tests.harness.ports import free_ports
from tests.harness.programs import eventually
from tests.harness.thorough import whole_only

from ..system.proxy import postgres_through  # noqa: TID252


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
