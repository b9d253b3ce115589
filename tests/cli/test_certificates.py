"""Certificates are verified, unless a setting says in plain words whose are not: asked of a real Redis with TLS."""

import os
import shutil
import subprocess
from contextlib import closing

import pytest
import redis

from tests.harness.every import every
from tests.harness.ports import free_ports
from tests.harness.waiting import wait_until

LIMIT = 30.0
STORE = '{"artifacts": "s3://bucket?region=eu&allow_invalid_certificates=true"}'
SERVING = ["worker", "scheduler", "exporter"]
UNVERIFIED_REDIS = ["ssl_cert_reqs=none", "ssl_cert_reqs=optional", "ssl_check_hostname=false", "ssl_check_hostname=No"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The port of a Redis with TLS and a certificate of its own."""
    if shutil.which("redis-server") is None or shutil.which("openssl") is None:
        assert "CI" not in os.environ, "redis-server or openssl is missing: .ci/run installs them"
        pytest.skip("redis-server or openssl is not installed")
    folder, (port,) = tmp_path_factory.mktemp("tls"), free_ports(1)
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-subj", "/CN=redis", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate),
        ],
        check=True,
        capture_output=True,
    )
    process = subprocess.Popen(
        [
            *("redis-server", "--port", "0", "--tls-port", str(port), "--bind", "127.0.0.1", "--save", ""),
            *("--tls-cert-file", certificate, "--tls-key-file", key, "--tls-auth-clients", "no", "--dir", folder),
        ],
        stdout=subprocess.DEVNULL,
    )
    try:
        with closing(redis.Redis("127.0.0.1", port, ssl=True, ssl_ca_certs=str(certificate))) as client:
            assert wait_until(lambda: answers(client), LIMIT)
        yield port
    finally:
        process.kill()
        process.wait()


def answers(client):
    try:
        return client.ping()
    except redis.ConnectionError:
        return False


def url(port, *options):
    return f"rediss://127.0.0.1:{port}/0?{'&'.join(options)}"


def test_a_certificate_that_nobody_vouches_for_is_taken_only_where_a_setting_says_so(main, database, server):
    refused = main("leases", REDIS_URL=url(server))
    taken = main("leases", REDIS_URL=url(server, "ssl_cert_reqs=none"), TLS_UNVERIFIED="redis")

    assert (refused.status, taken.status) == (1, 0)
    assert "certificate verify failed: self-signed certificate" in refused.complaint


@every(
    "command, option",
    [*(("leases", one) for one in UNVERIFIED_REDIS), *((one, UNVERIFIED_REDIS[0]) for one in SERVING)],
)
def test_a_redis_that_would_go_unverified_is_refused_at_the_start(main, settings, command, option):
    result = main(command, REDIS_URL=url(1, option))

    assert result.status == 2
    assert result.complaint.startswith(
        f"FORGEKEEPER_REDIS_URL sets {option.partition('=')[0]}, so anybody on the network path can pose as "
    )
    assert "set FORGEKEEPER_TLS_UNVERIFIED=redis (everything: both Redis and stores)" in result.complaint


def test_a_store_that_would_go_unverified_is_refused_by_name(main, settings):
    result = main("settings", OBJECT_STORES=STORE)

    assert result.status == 2
    assert result.complaint.startswith("FORGEKEEPER_OBJECT_STORES (artifacts) sets allow_invalid_certificates, so ")
    assert "set FORGEKEEPER_TLS_UNVERIFIED=stores (everything: both Redis and stores)" in result.complaint


def test_check_warns_of_what_goes_unverified(main, database):
    ((level, _message),) = main("check", "--json", TLS_UNVERIFIED="redis").findings("tls")

    assert level == "warning"
