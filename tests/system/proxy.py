"""A TCP proxy that can be made to fail, for Redis and PostgreSQL.

It listens on a port of 127.0.0.1 and forwards to an address or to a Unix socket.  How it behaves can be changed at any
moment, for new connections and for those that are open; each method returns when it is so.
"""

import asyncio
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from tests.harness.ports import free_ports

LIMIT = 10.0
CHUNK = 64 * 1024
TURNS = 20
NO_LINGER = struct.pack("ii", 1, 0)


@dataclass(eq=False)
class Connection:
    """The two ends of a connection, and what the client has asked last."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    last: bytes = b""

    def cut(self):
        """Close both as a network does that has lost them: the client's with a reset."""
        with suppress(OSError):
            sock = self.client.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        self.client.transport.abort()
        self.server.transport.abort()


class Proxy:
    """A proxy in a thread of its own; *target* is a host and port, or the path of a Unix socket.

    `connections` have come so far, `dropped` replies were swallowed, and `unread` requests lie in a black hole.
    """

    def __init__(self, target):
        self.connections = self.dropped = self.unread = 0
        self._target = target
        self._open, self._listener = set(), None
        # Its own while it refuses, too.
        (self.port,) = free_ports(1)
        self._loop = asyncio.new_event_loop()
        self._passes = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"proxy:{self.port}", daemon=True)
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
            self._order(self._end_tasks())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(LIMIT)
            self._loop.close()

    def passing(self, *, latency=0.0):
        """Forward everything, *latency* seconds late in each direction."""
        self._order(self._set(latency=latency))

    def refuse(self):
        """Refuse new connections; those that are open go on."""
        self._order(self._set(listens=False))

    def black_hole(self):
        """Accept connections, and forward nothing, of old ones and new ones."""
        self._order(self._set(silent=True))

    def cut(self):
        """Close all connections; how new ones fare stays as it is."""
        self._order(self._cut())

    def drop_replies(self, replies=1, *, to=b"", then_cut=False):
        """Forward requests, and swallow the next replies to those that contain *to*; with *then_cut* cut these, too."""
        self._order(self._set(swallows=replies, to=to, then_cut=then_cut))

    # The thread's own.

    def _order(self, what):
        asyncio.run_coroutine_threadsafe(what, self._loop).result(LIMIT)

    async def _set(self, *, latency=0.0, listens=True, silent=False, swallows=0, to=b"", then_cut=False):
        self._latency, self._swallows, self._to, self._then_cut = latency, swallows, to, then_cut
        (self._passes.clear if silent else self._passes.set)()
        if listens and self._listener is None:
            options = {"reuse_address": True, "backlog": 128}
            self._listener = await asyncio.start_server(self._accept, "127.0.0.1", self.port, **options)
        elif not listens and self._listener is not None:
            self._listener.close()
            self._listener = None

    async def _cut(self):
        # What is lost is so once the loop has turned; one that is just being made is there some turns later.
        for _ in range(TURNS):
            for connection in self._open:
                connection.cut()
            await asyncio.sleep(0)

    async def _end_tasks(self):
        await self._cut()
        # Connections whose target has not answered yet are in no list.
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)

    async def _accept(self, from_client, client):
        self.connections += 1
        try:
            if isinstance(self._target, str):
                from_server, server = await asyncio.open_unix_connection(self._target)
            else:
                from_server, server = await asyncio.open_connection(*self._target)
        except (OSError, asyncio.CancelledError):
            client.transport.abort()
            return
        connection = Connection(client, server)
        self._open.add(connection)
        await asyncio.gather(self._requests(from_client, connection), self._replies(from_server, connection))
        self._open.discard(connection)

    async def _requests(self, reader, connection):
        while data := await _read(reader):
            self.unread += 1
            await self._passes.wait()
            self.unread -= 1
            connection.last = data
            await self._forward(data, connection.server)
        await self._end(connection.server)

    async def _replies(self, reader, connection):
        while data := await _read(reader):
            await self._passes.wait()
            if self._swallows and self._to in connection.last:
                self._swallows -= 1
                self.dropped += 1
                if self._then_cut:
                    connection.cut()
            else:
                await self._forward(data, connection.client)
        await self._end(connection.client)

    async def _forward(self, data, writer):
        await asyncio.sleep(self._latency)
        with suppress(OSError):
            writer.write(data)
            await writer.drain()

    async def _end(self, writer):
        await self._passes.wait()
        writer.close()


async def _read(reader):
    with suppress(OSError):
        return await reader.read(CHUNK)
    return b""


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
