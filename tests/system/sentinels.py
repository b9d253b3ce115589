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
SERVER_SETTINGS = f"""
save ""
appendonly yes
requirepass {PASSWORD}
masterauth {PASSWORD}
"""
SENTINEL_SETTINGS = f"""
sentinel monitor {MASTER} 127.0.0.1 {{master}} {QUORUM}
sentinel auth-pass {MASTER} {PASSWORD}
sentinel down-after-milliseconds {MASTER} 1000
sentinel failover-timeout {MASTER} 5000
"""


class WatchedRedis:
    """A master, its replica and their Sentinels; *url* names the Sentinels.

    With a *certificate* all of them listen with TLS only.
    """

    def __init__(self, stack, folder, certificate=None):
        self._stack, self._folder, self._certificate = stack, folder, certificate
        self._master, self._replica, *self._sentinels = free_ports(2 + NUMBER_OF_SENTINELS)
        self.master = self._start(self._master, SERVER_SETTINGS)
        self._start(self._replica, f"{SERVER_SETTINGS}replicaof 127.0.0.1 {self._master}\n")
        for port in (self._master, self._replica):
            assert wait_until(lambda port=port: self._answers(port), LIMIT)
        for port in self._sentinels:
            self._start(port, SENTINEL_SETTINGS.format(master=self._master), "--sentinel")
        hosts = ",".join(f"127.0.0.1:{port}" for port in self._sentinels)
        scheme, query = ("rediss", certificate.query) if certificate else ("redis", "")
        self.url = f"{scheme}+sentinel://:{PASSWORD}@{hosts}/{MASTER}/0{query}"
        for port in self._sentinels:
            assert wait_until(lambda port=port: self._knows_all(port), LIMIT)

    def _start(self, port, settings, *options):
        folder = self._folder / f"redis-{port}"
        folder.mkdir()
        lines = {"bind": "127.0.0.1", "dir": folder, "port": port}
        if self._certificate:
            lines |= {"port": 0, "tls-port": port, "tls-replication": "yes", **self._certificate.server_options}
        file = folder / "redis.conf"
        file.write_text("".join(f"{name} {value}\n" for name, value in lines.items()) + settings)
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen([find_redis(), file, *options], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
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
            with closing(self.connect(port, password=None)) as client:
                state = client.sentinel_masters()[MASTER]
        except redis.RedisError:
            return False
        return (state["num-slaves"], state["num-other-sentinels"]) == (1, NUMBER_OF_SENTINELS - 1)

    def connect(self, port, password=PASSWORD):
        """Return a client of one of the servers or Sentinels."""
        options = {"ssl": True, **self._certificate.client_options} if self._certificate else {}
        return redis.Redis("127.0.0.1", port, password=password, decode_responses=True, **options)

    def kill_master(self):
        """Kill the master."""
        self.master.send_signal(signal.SIGKILL)
        self.master.wait()

    def replica_is_master(self):
        """Return whether the replica has been promoted."""
        with closing(self.connect(self._replica)) as client:
            return client.info("replication")["role"] == "master"
