"""A proxy in front of an S3 server that injects errors, incomplete answers and delays."""

import re
import threading
from collections import Counter, defaultdict
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import unescape

from forgekeeper.targets.sentinel import SENTINEL_NAME
from tests.harness.signatures import is_signed

ERROR = '<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{0}</Code><Message>{0}, said the proxy.</Message></Error>'
OBJECT = re.compile(r"<Object>\s*<Key>(.*?)</Key>.*?</Object>", re.DOTALL)
ALWAYS = {"Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT", "ETag": '"0"'}
PASSED_ON = ("Content-Length", "Last-Modified", "x-amz-version-id")
UPLOAD = re.compile(rb"<Upload>.*?</Upload>", re.DOTALL)
DELETED = re.compile(rb"<Deleted>.*?</Deleted>", re.DOTALL)


def place_of(upload):
    """Return the key and the id by which S3 sorts uploads."""
    return tuple(re.search(b"<%s>(.*?)</%s>" % (name, name), upload)[1] for name in (b"Key", b"UploadId"))


class ProxyServer(ThreadingHTTPServer):
    """HTTP server with room for 128 waiting connections: with the default of five, others are delayed for a second."""

    request_queue_size = 128
    daemon_threads = True


class FaultyS3:
    """The proxy, which counts requests by kind.

    The kinds are `head` (reads an object's head, or the sentinel), `bulk` (`POST ?delete`), `single` (deletes an object),
    `uploads` (begins, lists or aborts multipart uploads), and `other`.
    """

    def __init__(self, target, secret):
        self.counts = Counter()
        self.headers, self.paths = defaultdict(list), defaultdict(list)
        self.secret = secret
        self.lists_exactly = False
        """Whether a listing of uploads treats its prefix as a whole key, as MinIO does."""
        self.uploads_per_page = 1000
        self._target = urlsplit(target).netloc
        self._refused_keys = {}
        self._named = None
        self._answers = {}
        self._hooks = {}
        self._lost = {}
        self._hanging = set()
        self._closing = threading.Event()
        self._lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *arguments):
                pass

            def handle_one_request(self):
                # One handler for all methods: http.server expects a method do_… for each.
                self.raw_requestline = self.rfile.readline()
                if self.raw_requestline and self.parse_request():
                    proxy._serve(self)
                    self.wfile.flush()

        self._server = ProxyServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def refuse_key(self, key, code):
        """Refuse to delete *key*, alone or in bulk; a bulk answer names it in an <Error>."""
        self._refused_keys[key] = code

    def name_in_bulk(self, count, *, delete=None):
        """Name only *count* keys in the answer to a bulk deletion, and delete only *delete* keys; None means all."""
        self._named = count, delete

    def answer(self, status, code, *, kinds=("head", "bulk", "single", "uploads", "other"), times=None):
        """Answer the next *times* requests of these kinds with an error; without *times*, all of them."""
        for kind in kinds:
            self._answers[kind] = [status, ERROR.format(code), times]

    def answer_body(self, status, body, *, kinds):
        """Answer requests of these kinds with a fixed body."""
        for kind in kinds:
            self._answers[kind] = [status, body, None]

    def hang(self, *kinds):
        """Never answer requests of these kinds."""
        self._hanging |= set(kinds)

    def lose_answer(self, kind, act):
        """Execute the next request of this *kind*, call *act*, and close the connection without an answer."""
        self._lost[kind] = act

    def before(self, kind, number, act):
        """Call *act* before the request of this *kind* and *number* is processed."""
        self._hooks[kind, number] = act

    def stop(self):
        """Stop the server; later connections are refused."""
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _serve(self, request):
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0)).decode("utf-8", "surrogateescape")
        kind = self._kind(request)
        with self._lock:
            self.counts[kind] += 1
            self.headers[kind].append(request.headers)
            self.paths[kind].append(request.path)
            act = self._hooks.get((kind, self.counts[kind]))
        if act:
            act()
        if kind in self._hanging:
            self._closing.wait()
        if self._closing.is_set():
            return
        claims_proof = request.headers.get("Authorization", "").startswith("AWS4-HMAC-SHA256")
        said = request.command, request.path, request.headers, body.encode("utf-8", "surrogateescape")
        signed = not claims_proof or is_signed(*said, self.secret)
        error = self._next_error(kind) if signed else (403, ERROR.format("SignatureDoesNotMatch"))
        if error:
            self._send(request, error[0], error[1].encode())
        elif kind in self._lost:
            self._ask(request, body.encode("utf-8", "surrogateescape"))
            self._lost.pop(kind)()
        else:
            self._forward(request, body)

    def _kind(self, request):
        path, _, query = request.path.partition("?")
        if "upload" in query:
            return "uploads"
        if request.command == "POST" and query in ("delete", "delete="):
            return "bulk"
        if request.command == "GET" and path.endswith(f"/{SENTINEL_NAME}"):
            return "head"
        return {"HEAD": "head", "DELETE": "single"}.get(request.command, "other")

    def _next_error(self, kind):
        with self._lock:
            status, body, times = self._answers.get(kind, (None, None, 0))
            if times == 0:
                return None
            if times is not None:
                self._answers[kind][2] -= 1
            return status, body

    def _forward(self, request, body):
        named = [unescape(key) for key in OBJECT.findall(body)]
        single = unquote(request.path).split("/", 2)[-1] if request.command == "DELETE" else None
        if single in self._refused_keys:
            self._send(request, 403, ERROR.format(self._refused_keys[single]).encode())
            return
        refused = {key: code for key, code in self._refused_keys.items() if key in named}
        _, most = self._named or (None, None)
        left_out = {*refused, *(named[most:] if most is not None else ())}
        body = OBJECT.sub(lambda match: "" if unescape(match[1]) in left_out else match[0], body)
        errors = "".join(
            f"<Error><Key>{key}</Key><Code>{code}</Code><Message>{code}.</Message></Error>"
            for key, code in refused.items()
        )
        if refused and len(refused) == len(named):
            self._send(request, 200, f"<DeleteResult>{errors}</DeleteResult>".encode())
            return
        status, answer, headers = self._ask(request, body.encode("utf-8", "surrogateescape"))
        if request.command == "GET" and "?uploads" in request.path:
            answer = self._paged(answer, dict(parse_qsl(urlsplit(request.path).query)))
        if named and self._named:
            for unnamed in DELETED.findall(answer)[self._named[0] :]:
                answer = answer.replace(unnamed, b"")
        self._send(request, status, answer.replace(b"</DeleteResult>", f"{errors}</DeleteResult>".encode()), headers)

    def _paged(self, answer, query):
        """Divide a list of uploads into pages, which moto does not do."""
        found = sorted(UPLOAD.findall(answer), key=place_of)
        if self.lists_exactly:
            found = [one for one in found if place_of(one)[0] == query["prefix"].encode()]
        marker = query.get("key-marker", "").encode(), query.get("upload-id-marker", "").encode()
        found = [one for one in found if place_of(one) > marker]
        page, rest = found[: self.uploads_per_page], found[self.uploads_per_page :]
        markers = b"<NextKeyMarker>%s</NextKeyMarker><NextUploadIdMarker>%s</NextUploadIdMarker>"
        tail = b"<IsTruncated>true</IsTruncated>" + markers % place_of(page[-1]) if rest else b""
        root = b"ListMultipartUploadsResult"
        return b"<%s>%s%s</%s>" % (root, b"".join(page), tail, root)

    def _ask(self, request, body):
        connection = HTTPConnection(self._target)
        try:
            # Headers with digests are left out: the proxy may have changed the body.
            headers = {key: request.headers[key] for key in ("Authorization", "Host") if key in request.headers}
            connection.request(request.command, request.path, body, headers)
            answer = connection.getresponse()
            # Rename the root element as Amazon documents it.
            body = answer.read().replace(b"GetBucketVersioningResponse", b"VersioningConfiguration")
            return answer.status, body, {name: answer.headers[name] for name in PASSED_ON if answer.headers[name]}
        finally:
            connection.close()

    def _send(self, request, status, body, headers=None):
        is_head = request.command == "HEAD"
        length = {} if is_head and headers else {"Content-Length": str(0 if is_head else len(body))}
        request.send_response(status)
        for name, value in {**ALWAYS, **(headers or {}), **length}.items():
            request.send_header(name, value)
        request.end_headers()
        if not is_head:
            request.wfile.write(body)
