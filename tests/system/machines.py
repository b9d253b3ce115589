"""Machines as network namespaces: each has its own scheduler and worker, and all share one PostgreSQL and one Redis."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from demo.servers import database_url, start_postgres
from demo.servers.machine import find_programs, find_redis
from demo.servers.server import open_folders
from forgekeeper.platform.settings import PREFIX
from tests.harness.ports import accepts_connections
from tests.harness.programs import ROOT
from tests.harness.waiting import wait_until

LIMIT = 60.0
SERVER_ADDRESS = "10.77.0.1"
"""Address of both servers, in a network that only the namespaces share."""
POSTGRES_PORT, REDIS_PORT = 5432, 6379
BRIDGE = "bridge"


def why_without_namespaces():
    """Return why this machine cannot have network namespaces; None if it can."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and the command ip (Debian: iproute2)"
    probe = f"forgekeeper-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "delete", probe], capture_output=True, check=False)
    return None if made.returncode == 0 else f"no network namespace can be made here: {made.stderr.strip()}"


class Network:
    """A namespace with the servers, and one for each machine, behind a bridge."""

    def __init__(self, stack):
        self._stack, self._prefix = stack, f"forgekeeper-{os.getpid()}"
        self.servers = self._add_namespace("servers")
        self._inside(self.servers, "link", "add", BRIDGE, "type", "bridge")
        self._inside(self.servers, "address", "add", f"{SERVER_ADDRESS}/24", "dev", BRIDGE)
        self._inside(self.servers, "link", "set", BRIDGE, "up")

    def _add_namespace(self, name):
        namespace = f"{self._prefix}-{name}"
        subprocess.run(["ip", "netns", "add", namespace], check=True)
        self._stack.callback(subprocess.run, ["ip", "netns", "delete", namespace], check=True)
        self._inside(namespace, "link", "set", "lo", "up")
        return namespace

    def _inside(self, namespace, *words):
        subprocess.run(["ip", "-n", namespace, *words], check=True)

    def add_machine(self, number):
        """Connect a new namespace to the bridge; return its name."""
        namespace = self._add_namespace(f"machine{number}")
        self._inside(self.servers, "link", "add", f"port{number}", "type", "veth", "peer", "eth0", "netns", namespace)
        self._inside(self.servers, "link", "set", f"port{number}", "master", BRIDGE, "up")
        self._inside(namespace, "address", "add", f"10.77.0.{10 + number}/24", "dev", "eth0")
        self._inside(namespace, "link", "set", "eth0", "up")
        return namespace

    def set_link(self, number, state):
        """Connect a machine with the others, or cut it off: packets are lost without a word."""
        self._inside(self.servers, "link", "set", f"port{number}", state)


class SharedServers:
    """PostgreSQL and Redis at `SERVER_ADDRESS`; *local_url* leads to PostgreSQL without the network."""

    def __init__(self, stack, network):
        enter = ["ip", "netns", "exec", network.servers]
        programs = find_programs()
        site = stack.enter_context(open_folders(None))
        options = {"listen_addresses": SERVER_ADDRESS, "max_connections": "200"}
        postgres = start_postgres(site, replace(programs, prefix=[*enter, *programs.prefix]), options)
        stack.callback(postgres.stop)
        postgres.wait_until_ready()
        access = site.folder / "postgres" / "pg_hba.conf"
        with access.open("a") as file:
            file.write("host all all 10.77.0.0/24 trust\n")
        postgres.process.send_signal(signal.SIGHUP)
        self._start_redis(stack, enter, site)
        self.local_url = database_url(site)
        self.database_url = f"postgresql://forgekeeper@{SERVER_ADDRESS}:{POSTGRES_PORT}/forgekeeper"
        self.redis_url = f"redis://{SERVER_ADDRESS}:{REDIS_PORT}/0"
        self.local_redis_url = f"unix://{self._socket}?db=0"

    def _start_redis(self, stack, enter, site):
        self._socket = site.sockets / "redis.sock"
        words = ("--bind", SERVER_ADDRESS, "--port", str(REDIS_PORT), "--protected-mode", "no", "--save", "")
        command = [*enter, find_redis(), *words, "--dir", str(site.folder), "--unixsocket", str(self._socket)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        stack.callback(process.wait)
        stack.callback(process.kill)
        assert wait_until(lambda: accepts_connections(self._socket), LIMIT)


class Machine:
    """A scheduler and a worker in a network namespace, of the version in a folder."""

    def __init__(self, network, number, folder, settings):
        self._network, self._number, self._folder, self._settings = network, number, folder, settings
        self._namespace = network.add_machine(number)
        self._processes, self._starts = [], 0

    def start(self, version=ROOT):
        """Start both processes, with the product's files of that folder."""
        self._starts += 1
        environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        environment |= {PREFIX + name.upper(): value for name, value in self._settings.items()}
        environment["PYTHONPATH"] = str(version)
        for words in (("scheduler",), ("worker", "--processes", "1", "--threads", "3")):
            command = ["ip", "netns", "exec", self._namespace, sys.executable, "-m", "forgekeeper.cli", *words]
            with self.log(words[0]).open("wb") as log:
                streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
                process = subprocess.Popen(
                    command, **streams, env=environment, cwd=self._folder, start_new_session=True
                )
            self._processes.append(process)

    def log(self, command):
        """Return the file with the log of the latest start."""
        return self._folder / f"{command}-{self._number}-{self._starts}.log"

    def cut_off(self):
        """Lose each packet from and to this machine."""
        self._network.set_link(self._number, "down")

    def reconnect(self):
        """Carry packets again."""
        self._network.set_link(self._number, "up")

    def kill(self):
        """Kill all processes at once, as if the power failed."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._processes.clear()

    def end(self):
        """Ask both processes to end, and return their exit statuses."""
        for process in self._processes:
            process.terminate()
        statuses = [process.wait(LIMIT) for process in self._processes]
        self._processes.clear()
        return statuses


def unpack_version(commit, folder):
    """Write the product's files of a commit into the folder; return the folder, None if the history lacks the commit."""
    folder.mkdir()
    parts = ("forgekeeper", "metrics", "workers", "forges", "demo", "models.py", "scheduler.py")
    archive = subprocess.run(["git", "-C", ROOT, "archive", commit, *parts], capture_output=True, check=False)
    if archive.returncode != 0:
        return None
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
    return Path(folder)
