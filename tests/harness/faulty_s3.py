"""A proxy in front of an S3 server that does what real ones do on bad days."""

import re
import threading
from collections import Counter
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit
from xml.sax.saxutils import unescape

from forgekeeper.storage.sentinel import NAME

ERROR = '<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{0}</Code><Message>{0}, said the proxy.</Message></Error>'
OBJECT = re.compile(r"<Object>\s*<Key>(.*?)</Key>.*?</Object>", re.DOTALL)


class Server(ThreadingHTTPServer):
    """One whose queue takes all that are asked at once: by default five wait, and others are lost for a second."""

    request_queue_size = 128
    daemon_threads = True


class FaultyS3:
    """Counts requests by kind: `head` (a look at one, or at the sentinel), `bulk` (deletes many), `single` (deletes one), `other`."""

    def __init__(self, target):
        self.counts = Counter()
        self._target = urlsplit(target).netloc
        self._refused_keys = {}
        self._answers = {}
        self._hooks = {}
        self._hanging = set()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *arguments):
                pass

            def handle_one_request(self):
                # Whatever the method is; http.server would want one do_… for each.
                self.raw_requestline = self.rfile.readline()
                if self.raw_requestline and self.parse_request():
                    proxy._serve(self)
                    self.wfile.flush()

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def refuse_key(self, key, code):
        """Name *key* in an <Error> of an otherwise successful deletion."""
        self._refused_keys[key] = code

    def answer(self, status, code, *, kinds=("head", "bulk", "single", "other"), times=None):
        """Answer the next *times* requests of these kinds with an error; without *times*, all."""
        for kind in kinds:
            self._answers[kind] = [status, code, times]

    def hang(self, *kinds):
        """Never answer requests of these kinds."""
        self._hanging |= set(kinds)

    def before(self, kind, number, act):
        """Call *act* before the request of this *kind* and *number* is looked at."""
        self._hooks[kind, number] = act

    def stop(self):
        """Refuse connections from now on."""
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _serve(self, request):
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0)).decode("utf-8", "surrogateescape")
        kind = self._kind(request, body)
        with self._lock:
            self.counts[kind] += 1
            act = self._hooks.get((kind, self.counts[kind]))
        if act:
            act()
        if kind in self._hanging:
            self._closing.wait()
        if self._closing.is_set():
            return
        error = self._next_error(kind)
        if error:
            self._send(request, error[0], ERROR.format(error[1]).encode())
        else:
            self._forward(request, body)

    def _kind(self, request, body):
        if request.command == "POST" and request.path.endswith("?delete"):
            return "bulk" if len(OBJECT.findall(body)) > 1 else "single"
        if request.command == "GET" and urlsplit(request.path).path.endswith(f"/{NAME}"):
            return "head"
        return {"HEAD": "head", "DELETE": "single"}.get(request.command, "other")

    def _next_error(self, kind):
        with self._lock:
            status, code, times = self._answers.get(kind, (None, None, 0))
            if times == 0:
                return None
            if times is not None:
                self._answers[kind][2] -= 1
            return status, code

    def _forward(self, request, body):
        named = [unescape(key) for key in OBJECT.findall(body)]
        refused = {key: code for key, code in self._refused_keys.items() if key in named}
        body = OBJECT.sub(lambda match: "" if unescape(match[1]) in refused else match[0], body)
        errors = "".join(
            f"<Error><Key>{key}</Key><Code>{code}</Code><Message>{code}.</Message></Error>"
            for key, code in refused.items()
        )
        if refused and len(refused) == len(named):
            self._send(request, 200, f"<DeleteResult>{errors}</DeleteResult>".encode())
            return
        status, answer, *headers = self._ask(request, body.encode("utf-8", "surrogateescape"))
        self._send(request, status, answer.replace(b"</DeleteResult>", f"{errors}</DeleteResult>".encode()), *headers)

    def _ask(self, request, body):
        connection = HTTPConnection(self._target)
        try:
            # Digests of the body are left out: it may have been changed.
            headers = {key: request.headers[key] for key in ("Authorization", "Host") if key in request.headers}
            connection.request(request.command, request.path, body, headers)
            answer = connection.getresponse()
            headers = answer.headers
            return answer.status, answer.read(), headers.get("Content-Length"), headers.get("Last-Modified")
        finally:
            connection.close()

    def _send(self, request, status, body, length=None, modified=None):
        request.send_response(status)
        request.send_header("Last-Modified", modified or "Thu, 01 Jan 2026 00:00:00 GMT")
        request.send_header("ETag", '"0"')
        is_head = request.command == "HEAD"
        request.send_header("Content-Length", length or "0" if is_head else str(len(body)))
        request.end_headers()
        if not is_head:
            request.wfile.write(body)
