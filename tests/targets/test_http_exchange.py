"""One HTTP request: over TLS, through a proxy, with every way in which an answer says how long it is."""

import asyncio
import shutil
import ssl
import subprocess
from contextlib import AsyncExitStack
from urllib.parse import urlsplit

import pytest

from forgekeeper.targets import http_exchange
from forgekeeper.targets.http_exchange import HttpServer

ANSWERS = {
    "length": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
    "chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;x=y\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n",
    "end": b"HTTP/1.0 200 OK\r\n\r\nhello",
}
BROKEN = {
    "nothing": b"",
    "no end of the head": b"HTTP/1.1 200 OK\r\n",
    "too short": b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nhello",
    "no last chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
    "no status": b"hello\r\n\r\n",
    "too long": b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\nhello",
}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", "/CN=store", "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


def ask(answer, *, tls=None, proxy=False, user="", **options):
    """Ask a server that gives this answer; return it, and what a proxy was asked."""
    heard = []

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.transport.abort() if tls else writer.close()

    async def relay(reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        heard.extend(head)
        host, port = head[0].split(" ")[1].split(":")
        there, thither = await asyncio.open_connection(host, port)
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        try:
            await asyncio.gather(pipe(reader, thither), pipe(there, writer))
        finally:
            thither.transport.abort()
            writer.transport.abort()

    async def pipe(source, target):
        while some := await source.read(4096):
            target.write(some)

    async def exchange():
        async with AsyncExitStack() as stack:
            server, relaying = await asyncio.start_server(serve, "localhost", ssl=tls), None
            await stack.enter_async_context(server)
            if proxy:
                relaying = await stack.enter_async_context(await asyncio.start_server(relay, "localhost"))
                options["proxy_url"] = f"http://{user}localhost:{relaying.sockets[0].getsockname()[1]}"
            port = server.sockets[0].getsockname()[1]
            url = urlsplit(f"{'http' if tls is None else 'https'}://localhost:{port}")
            return await HttpServer(url, **options).exchange("GET", "/a", {"host": url.netloc}, b"")

    return asyncio.run(exchange()), heard


@pytest.fixture
def tls(certificate):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    return context


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_an_answer_is_read_to_its_end_however_it_says_where_that_is(answer):
    (status, _headers, body), _ = ask(answer)

    assert (status, body) == (200, b"hello")


@pytest.mark.parametrize("answer", BROKEN.values(), ids=BROKEN)
def test_an_answer_that_is_none_is_an_error(answer):
    with pytest.raises((ConnectionError, ValueError)):
        ask(answer)


@pytest.mark.parametrize("proxy", [False, True], ids=["directly", "through a proxy"])
def test_over_tls_the_certificate_is_verified(tls, certificate, monkeypatch, proxy):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))

    (status, *_), heard = ask(ANSWERS["length"], tls=tls, proxy=proxy, user="ann:s%40y@")

    assert status == 200
    assert ("proxy-authorization: Basic YW5uOnNAeQ==" in heard) == proxy


def test_a_certificate_of_nobody_s_is_refused_unless_a_setting_says_otherwise(tls):
    with pytest.raises(ssl.SSLCertVerificationError):
        ask(ANSWERS["length"], tls=tls)

    assert ask(ANSWERS["length"], tls=tls, is_verified=False)[0].status == 200


def test_the_environment_names_a_proxy(monkeypatch):
    monkeypatch.setenv("https_proxy", "proxy.example:3128")
    monkeypatch.setenv("no_proxy", "near.example")

    def proxy_of(url):
        return HttpServer(urlsplit(url))._proxy

    assert http_exchange._host_and_port(proxy_of("https://far.example")) == ("proxy.example", 3128)
    assert proxy_of("https://near.example") is None
