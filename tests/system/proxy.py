"""A TCP proxy that can be made to fail, for Redis and PostgreSQL.

It listens on a port of 127.0.0.1 and forwards to an address or to a Unix socket.  How it behaves can be changed at any
moment, for new connections and for those that are open; each method returns when it is so.
"""

import asyncio
import fcntl
import socket
import struct
import termios
import threading
from contextlib import suppress
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from tests.harness.ports import free_ports

LIMIT = 10.0
NO_LINGER = struct.pack("ii", 1, 0)
TICK = 1e-6
"""What is to follow something in order is due so many seconds later at least."""


class End(asyncio.Protocol):
    """One end of a connection: what it reads goes to the *other*."""

    def __init__(self, proxy, other=None):
        self.proxy, self.other = proxy, other
        self.transport, self.last = None, b""
        self.due, self.delayed = 0.0, 0

    def connection_made(self, transport):
        self.transport = transport
        if self.other is None:
            self.proxy.accepted(self)

    def data_received(self, data):
        if self not in self.proxy.clients and self.proxy.drops(self.other):
            return
        self.last = data
        self.later(self.other.transport.write, data)

    def connection_lost(self, _error):
        self.proxy.clients.discard(self)
        if self.other is not None and self.other.transport is not None:
            self.later(self.other.transport.close)

    def later(self, what, *given):
        """Do it after what is under way already, and after the latency."""
        loop = self.proxy.loop
        if self.proxy.latency or self.delayed:
            self.due = max(self.due + TICK, loop.time() + self.proxy.latency)
            self.delayed += 1
            loop.call_at(self.due, self._do, what, given)
        else:
            what(*given)

    def _do(self, what, given):
        self.delayed -= 1
        what(*given)

    def waiting(self):
        """Count the bytes that have arrived and were not read."""
        with suppress(OSError):
            number = self.transport.get_extra_info("socket").fileno()
            return struct.unpack("i", fcntl.ioctl(number, termios.FIONREAD, b"\0" * 4))[0]
        return 0

    def cut(self):
        """Close it as a network does that has lost it: with a reset."""
        connection = self.transport.get_extra_info("socket")
        if connection is not None and connection.family == socket.AF_INET:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        self.transport.abort()


class Proxy:
    """A proxy in a thread of its own; *target* is a host and port, or the path of a Unix socket."""

    def __init__(self, target):
        self.connections, self.dropped, self.latency = 0, 0, 0.0
        self.clients = set()
        self._target = target
        self._swallows, self._to, self._then_cut, self._silent, self._listener = 0, b"", False, False, None
        # Its own while it refuses, too.
        (self.port,) = free_ports(1)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=f"proxy:{self.port}", daemon=True)
        self._thread.start()
        self.passing()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """End the proxy and all its connections."""
        if self._thread.is_alive():
            self.refuse()
            self.cut()
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(LIMIT)
            self.loop.close()

    def passing(self, *, latency=0.0):
        """Forward everything, *latency* seconds late in each direction."""
        self._order(self._set(latency=latency))

    def refuse(self):
        """Refuse new connections; those that are open go on."""
        self._order(self._set(listens=False, latency=self.latency))

    def black_hole(self):
        """Accept connections, and forward nothing, of old ones and new ones."""
        self._order(self._set(silent=True))

    def cut(self):
        """Close all connections; how new ones fare stays as it is."""
        self._order(self._cut())

    def drop_replies(self, replies=1, *, to=b"", then_cut=False):
        """Forward requests, and swallow the next replies to those that contain *to*; with *then_cut* the rest too."""
        self._order(self._set(swallows=replies, to=to, then_cut=then_cut))

    def unread(self):
        """How many connections have sent something that nobody has read: theirs is to wait for an answer."""
        return sum(client.waiting() > 0 for client in list(self.clients))

    # The thread's own.

    def _order(self, what):
        asyncio.run_coroutine_threadsafe(what, self.loop).result(LIMIT)

    async def _set(self, *, latency=0.0, listens=True, silent=False, swallows=0, to=b"", then_cut=False):
        self.latency, self._silent = latency, silent
        self._swallows, self._to, self._then_cut = swallows, to, then_cut
        for client in self.clients:
            self._let_read(client)
        if listens and self._listener is None:
            make = self.loop.create_server
            self._listener = await make(lambda: End(self), "127.0.0.1", self.port, reuse_address=True, backlog=128)
        elif not listens and self._listener is not None:
            self._listener.close()
            self._listener = None

    async def _cut(self):
        for client in list(self.clients):
            self._cut_both(client)
        # What is lost is so once the loop has turned.
        await asyncio.sleep(0)

    def _cut_both(self, client):
        for end in (client, client.other):
            if end.transport is not None:
                end.cut()

    def _let_read(self, client):
        for end in (client, client.other):
            if end.transport is not None and not end.transport.is_closing():
                (end.transport.pause_reading if self._silent else end.transport.resume_reading)()

    def accepted(self, client):
        """Connect a client's end with the server; until then nothing of it is read."""
        self.connections += 1
        client.other = End(self, client)
        self.clients.add(client)
        client.transport.pause_reading()
        self.loop.create_task(self._connect(client))

    async def _connect(self, client):
        make, there = self.loop.create_connection, {"host": self._target[0], "port": self._target[1]}
        if isinstance(self._target, str):
            make, there = self.loop.create_unix_connection, {"path": self._target}
        try:
            await make(lambda: client.other, **there)
        except OSError:
            client.transport.abort()
        else:
            if client.transport.is_closing():
                client.other.transport.abort()
            self._let_read(client)

    def drops(self, client):
        """Say whether a reply to the client is to be swallowed, and count it."""
        if not self._swallows or self._to not in client.last:
            return False
        self._swallows -= 1
        self.dropped += 1
        if self._then_cut:
            self._cut_both(client)
        return True


def redis_through(url):
    """Return a proxy before the Redis at *url*, and the URL that leads through it."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        options = dict(parse_qsl(parts.query))
        proxy = Proxy(parts.path)
        return proxy, f"redis://127.0.0.1:{proxy.port}/{options.get('db', 0)}"
    proxy = Proxy((parts.hostname, parts.port or 6379))
    secret = f":{quote(parts.password)}@" if parts.password else ""
    return proxy, f"{parts.scheme}://{secret}127.0.0.1:{proxy.port}{parts.path}"


def postgres_through(url):
    """Return a proxy before the PostgreSQL at *url*, and the URL that leads through it."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query))
    host, port = options.pop("host", parts.hostname), int(options.pop("port", parts.port or 5432))
    proxy = Proxy(f"{host}/.s.PGSQL.{port}" if host.startswith("/") else (host, port))
    user = parts.netloc.rpartition("@")[0]
    address = f"{user}@127.0.0.1:{proxy.port}" if user else f"127.0.0.1:{proxy.port}"
    return proxy, parts._replace(netloc=address, query=urlencode(options)).geturl()
