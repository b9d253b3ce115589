"""Debian's PgBouncer between the tests and PostgreSQL."""

import os
import shutil
import signal
import subprocess
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import parse_qsl, urlsplit

from demo.servers.machine import find_programs
from tests.harness.ports import accepts_connections
from tests.harness.waiting import wait_until

PORT = 5432
START_SECONDS = 30.0
# Sessions take turns, so that two transactions of a client rarely get the same session.
CONFIGURATION = """
[databases]
* = host={host} port={port}
[pgbouncer]
listen_addr =
listen_port = {PORT}
unix_socket_dir = {folder}
auth_type = trust
auth_file = {folder}/users
pool_mode = {mode}
server_round_robin = 1
default_pool_size = 30
min_pool_size = 3
max_client_conn = 300
{options}
"""


def find_pgbouncer():
    """Return the program; None if it is not installed."""
    return shutil.which("pgbouncer", path=os.environ.get("PATH", "") + os.pathsep + "/usr/sbin")


@contextmanager
def run_pgbouncer(url, mode, options=""):
    """Run PgBouncer in that *mode* (session, transaction, statement); return the URL that leads through it."""
    parts = urlsplit(url)
    place = dict(parse_qsl(parts.query))
    with TemporaryDirectory(prefix="forgekeeper-", dir="/tmp") as name:
        folder = Path(name)
        facts = {"host": place["host"], "port": place.get("port", PORT), "folder": folder, "mode": mode, "PORT": PORT}
        (folder / "ini").write_text(CONFIGURATION.format(**facts, options=options))
        (folder / "users").write_text(f'"{parts.username}" ""\n')
        programs = find_programs()
        for path in (folder, *folder.iterdir()) if programs.owner is not None else ():
            os.chown(path, programs.owner, -1)
        # It refuses to run as root.
        command = [*programs.prefix, find_pgbouncer(), "--quiet", str(folder / "ini")]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL) as process:
            try:
                assert wait_until(lambda: accepts_connections(folder / f".s.PGSQL.{PORT}"), START_SECONDS)
                yield parts._replace(query=f"host={folder}&port={PORT}").geturl()
            finally:
                # At once, without waiting for its clients.
                process.send_signal(signal.SIGTERM)
