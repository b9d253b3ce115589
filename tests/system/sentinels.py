"""A master of Redis, its replica, and three Sentinels that promote the replica."""

import signal
import subprocess
from contextlib import closing

import redis

from demo.servers.machine import find_redis
from tests.harness.ports import free_ports
from tests.harness.waiting import wait_until

LIMIT = 60.0
MASTER = "main"
PASSWORD = "replicated"
NUMBER_OF_SENTINELS, QUORUM = 3, 2
SENTINEL_CONFIGURATION = """
port {port}
bind 127.0.0.1
dir {folder}
sentinel monitor {MASTER} 127.0.0.1 {master} {QUORUM}
sentinel auth-pass {MASTER} {PASSWORD}
sentinel down-after-milliseconds {MASTER} 1000
sentinel failover-timeout {MASTER} 5000
"""


class WatchedRedis:
    """A master, its replica and their Sentinels; *url* names the Sentinels."""

    def __init__(self, stack, folder):
        self._stack, self._folder = stack, folder
        self._master, self._replica, *sentinels = free_ports(2 + NUMBER_OF_SENTINELS)
        self.master = self._start_server(self._master)
        self._start_server(self._replica, "--replicaof", "127.0.0.1", str(self._master))
        for port in (self._master, self._replica):
            assert wait_until(lambda port=port: self._answers(port), LIMIT)
        for port in sentinels:
            self._start_sentinel(port)
        hosts = ",".join(f"127.0.0.1:{port}" for port in sentinels)
        self.url = f"redis+sentinel://:{PASSWORD}@{hosts}/{MASTER}/0"
        self._sentinels = sentinels
        for port in sentinels:
            assert wait_until(lambda port=port: self._knows_all(port), LIMIT)

    def _start_server(self, port, *options):
        folder = self._folder / f"redis-{port}"
        folder.mkdir()
        words = ("--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", "")
        secrets = ("--requirepass", PASSWORD, "--masterauth", PASSWORD)
        return self._start([find_redis(), *words, *secrets, "--appendonly", "yes", *options], folder)

    def _start_sentinel(self, port):
        folder = self._folder / f"sentinel-{port}"
        folder.mkdir()
        facts = {"port": port, "folder": folder, "master": self._master}
        file = folder / "sentinel.conf"
        file.write_text(SENTINEL_CONFIGURATION.format(**facts, MASTER=MASTER, QUORUM=QUORUM, PASSWORD=PASSWORD))
        self._start([find_redis(), str(file), "--sentinel"], folder)

    def _start(self, command, folder):
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def _answers(self, port):
        try:
            with closing(self.connect(port)) as client:
                return client.info("replication")["role"] == "master" or client.info()["master_link_status"] == "up"
        except redis.RedisError:
            return False

    def _knows_all(self, port):
        """Return whether a Sentinel sees the replica and the other Sentinels."""
        try:
            with closing(redis.Redis("127.0.0.1", port)) as client:
                state = client.sentinel_masters()[MASTER]
        except redis.RedisError:
            return False
        return (state["num-slaves"], state["num-other-sentinels"]) == (1, NUMBER_OF_SENTINELS - 1)

    def connect(self, port):
        """Return a client of one of the servers."""
        return redis.Redis("127.0.0.1", port, password=PASSWORD, decode_responses=True)

    def kill_master(self):
        """Kill the master."""
        self.master.send_signal(signal.SIGKILL)
        self.master.wait()

    def replica_is_master(self):
        """Return whether the replica has been promoted."""
        with closing(self.connect(self._replica)) as client:
            return client.info("replication")["role"] == "master"
