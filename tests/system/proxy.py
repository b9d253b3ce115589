"""A TCP proxy that can be made to fail, for Redis and PostgreSQL.

It listens on a port of 127.0.0.1 and forwards to an address or to a Unix socket.  How it
behaves can be changed at any moment, for new connections and for those that are open:

pass        forward both ways, after *latency* seconds
refuse      listen no more; connections that are open stay
black_hole  accept, and forward nothing in either direction
cut         close all connections at once, then pass
drop        forward requests, and swallow the next replies; then pass, or cut
"""

import fcntl
import selectors
import socket
import struct
import termios
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from tests.harness.ports import free_ports

READ = 1 << 16
FOREVER = 3600.0


@dataclass(eq=False)
class End:
    """One end of a connection: what is to be written to it, and from when on."""

    socket: socket.socket
    client: bool
    other: "End" = None
    waiting: deque = field(default_factory=deque)
    last: bytes = b""
    full: bool = False
    finished: bool = False


class Proxy:
    """A proxy in a thread of its own; *target* is a host and port, or the path of a Unix socket."""

    def __init__(self, target):
        self.connections = 0
        self.dropped = 0
        self._target = target
        self._mode = "pass"
        self._latency = 0.0
        self._drops = 0
        self._to = b""
        self._then_cut = False
        self._selector = selectors.DefaultSelector()
        self._ends = set()
        self._listener = None
        self._orders = deque()
        self._waker, self._wakened = socket.socketpair()
        self._wakened.setblocking(False)
        self._selector.register(self._wakened, selectors.EVENT_READ)
        # Its own while it refuses, too.
        (self.port,) = free_ports(1)
        self._listen()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=f"proxy:{self.port}", daemon=True)
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """End the proxy and all its connections."""
        if self._thread.is_alive():
            self._order(self._stop)
            self._thread.join(10)
        assert not self._thread.is_alive(), "the proxy hangs"
        self._selector.close()
        self._waker.close()
        self._wakened.close()

    # What a test may ask for; each has happened when the method returns.

    def passing(self, *, latency=0.0):
        """Forward everything, *latency* seconds late in each direction."""
        self._order(lambda: self._set("pass", latency=latency))

    def refuse(self):
        """Refuse new connections; those that are open go on."""
        self._order(lambda: self._set("refuse", latency=self._latency))

    def black_hole(self):
        """Accept connections, and forward nothing, of old ones and new ones."""
        self._order(lambda: self._set("black_hole"))

    def cut(self):
        """Close all connections; how new ones fare stays as it is."""
        self._order(self._cut_all)

    def drop_replies(self, replies=1, *, to=b"", then_cut=False):
        """Forward requests, and swallow the next replies to those that contain *to*; with *then_cut* the rest too."""
        self._order(lambda: self._set("pass", drops=replies, to=to, then_cut=then_cut))

    @property
    def open(self):
        """How many connections are open."""
        return sum(end.client for end in list(self._ends))

    def unread(self):
        """How many connections have sent something that nobody has read: theirs is to wait for an answer."""
        return sum(end.client and _waiting_in(end.socket) > 0 for end in list(self._ends))

    # The thread's own.

    def _order(self, what):
        done = threading.Event()
        self._orders.append((what, done))
        self._waker.send(b"!")
        assert done.wait(10), "the proxy hangs"

    def _set(self, mode, *, latency=0.0, drops=0, to=b"", then_cut=False):
        self._mode, self._latency = mode, latency
        self._drops, self._to, self._then_cut = drops, to, then_cut
        if mode == "refuse" and self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
        elif mode != "refuse" and self._listener is None:
            self._listen()
        for end in self._ends:
            self._watch(end)

    def _listen(self):
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(("127.0.0.1", self.port))
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)

    def _stop(self):
        self._cut_all()
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
        self._stopped = True

    def _run(self):
        while not self._stopped:
            for key, events in self._selector.select(self._patience()):
                if key.fileobj is self._wakened:
                    self._obey()
                elif key.fileobj is self._listener:
                    self._accept()
                elif key.data in self._ends:
                    self._serve(key.data, events)
            for end in list(self._ends):
                self._write(end)

    def _obey(self):
        with suppress(BlockingIOError):
            self._wakened.recv(READ)
        while self._orders:
            what, done = self._orders.popleft()
            what()
            done.set()

    def _accept(self):
        with suppress(OSError):
            near, _ = self._listener.accept()
            self.connections += 1
            far = socket.socket(socket.AF_UNIX if isinstance(self._target, str) else socket.AF_INET)
            try:
                far.connect(self._target)
            except OSError:
                near.close()
                far.close()
                raise
            client, server = End(near, client=True), End(far, client=False)
            client.other, server.other = server, client
            for end in (client, server):
                end.socket.setblocking(False)
                if end.socket.family == socket.AF_INET:
                    end.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._ends.add(end)
                self._selector.register(end.socket, selectors.EVENT_READ, end)
                self._watch(end)

    def _serve(self, end, events):
        if events & selectors.EVENT_READ:
            try:
                data = end.socket.recv(READ)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                end.finished = True
                end.other.waiting.append((monotonic() + self._latency, b""))
            elif not end.client and self._drops and self._to in end.other.last:
                self._drop(end)
            else:
                end.last = data
                end.other.waiting.append((monotonic() + self._latency, data))
            self._watch(end)

    def _drop(self, end):
        self._drops -= 1
        self.dropped += 1
        if self._then_cut:
            self._cut(end)

    def _write(self, end):
        """Write what is due; an empty piece is the end."""
        while end in self._ends and self._mode != "black_hole" and end.waiting and end.waiting[0][0] <= monotonic():
            due, data = end.waiting.popleft()
            if not data:
                self._close(end)
                return
            try:
                sent = end.socket.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                self._close(end)
                return
            end.full = sent < len(data)
            if end.full:
                end.waiting.appendleft((due, data[sent:]))
                break
        self._watch(end)

    def _watch(self, end):
        """Wait for what the end can do now: a black hole reads nothing, a finished one nothing more."""
        if end not in self._ends:
            return
        events = 0
        if self._mode != "black_hole":
            events |= 0 if end.finished else selectors.EVENT_READ
            events |= selectors.EVENT_WRITE if end.full else 0
        registered = end.socket in self._selector.get_map()
        if events and registered:
            self._selector.modify(end.socket, events, end)
        elif events:
            self._selector.register(end.socket, events, end)
        elif registered:
            self._selector.unregister(end.socket)

    def _patience(self):
        if self._mode == "black_hole":
            return FOREVER
        due = [end.waiting[0][0] for end in self._ends if end.waiting and not end.full]
        return max(0.0, min(due) - monotonic()) if due else FOREVER

    def _close(self, end):
        for one in (end, end.other):
            if one in self._ends:
                self._ends.discard(one)
                if one.socket in self._selector.get_map():
                    self._selector.unregister(one.socket)
                one.socket.close()

    def _cut(self, end):
        """Close the connection as a network does that has lost it: with a reset."""
        for one in (end, end.other):
            if one.socket.family == socket.AF_INET:
                one.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._close(end)

    def _cut_all(self):
        for end in [end for end in self._ends if end.client]:
            self._cut(end)


def _waiting_in(connection):
    """Count the bytes that have arrived and were not read."""
    try:
        return struct.unpack("i", fcntl.ioctl(connection, termios.FIONREAD, b"\0" * 4))[0]
    except OSError:
        return 0


def redis_through(url, make=Proxy):
    """Return a proxy before the Redis at *url*, and the URL that leads through it."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        options = dict(parse_qsl(parts.query))
        proxy = make(parts.path)
        return proxy, f"redis://127.0.0.1:{proxy.port}/{options.get('db', 0)}"
    proxy = make((parts.hostname, parts.port or 6379))
    secret = f":{quote(parts.password)}@" if parts.password else ""
    return proxy, f"{parts.scheme}://{secret}127.0.0.1:{proxy.port}{parts.path}"


def postgres_through(url, make=Proxy):
    """Return a proxy before the PostgreSQL at *url*, and the URL that leads through it."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query))
    host, port = options.pop("host", parts.hostname), int(options.pop("port", parts.port or 5432))
    proxy = make(f"{host}/.s.PGSQL.{port}" if host.startswith("/") else (host, port))
    user = parts.netloc.rpartition("@")[0]
    address = f"{user}@127.0.0.1:{proxy.port}" if user else f"127.0.0.1:{proxy.port}"
    return proxy, parts._replace(netloc=address, query=urlencode(options)).geturl()
