"""Certificates are verified, unless a setting says in plain words whose are not: asked of a real Redis with TLS."""

import subprocess
from contextlib import closing

import pytest
import redis

from forgekeeper.cli.connection import describe_with_remedy
from tests.harness.certificates import Certificate
from tests.harness.every import every
from tests.harness.ports import free_ports
from tests.harness.waiting import wait_until

LIMIT = 30.0
STORE = '{"artifacts": "s3://bucket?region=eu&allow_invalid_certificates=true"}'
SERVING = ["worker", "scheduler", "exporter"]
UNVERIFIED_REDIS = ["ssl_cert_reqs=none", "ssl_cert_reqs=optional", "ssl_check_hostname=false", "ssl_check_hostname=No"]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return Certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module", params=["rediss://127.0.0.1:{}/0", "rediss+sentinel://127.0.0.1:{}/main/0"])
def url(request, tmp_path_factory, certificate):
    """URL of a Redis, or of a Sentinel, that listens with TLS only; the certificate's options are missing."""
    folder, (port,) = tmp_path_factory.mktemp("server"), free_ports(1)
    options = {"port": 0, "tls-port": port, "bind": "127.0.0.1", "dir": folder, **certificate.server_options}
    file = folder / "redis.conf"
    file.write_text("".join(f"{name} {value}\n" for name, value in options.items()))
    mode = ["--sentinel"] if "sentinel" in request.param else []
    process = subprocess.Popen(["redis-server", file, *mode], stdout=subprocess.DEVNULL)
    try:
        with closing(redis.Redis("127.0.0.1", port, ssl=True, **certificate.client_options)) as client:
            assert wait_until(lambda: answers(client), LIMIT)
        yield request.param.format(port)
    finally:
        process.kill()
        process.wait()


def answers(client):
    try:
        return client.ping()
    except redis.ConnectionError:
        return False


def test_a_server_of_an_unknown_authority_is_refused_with_a_remedy(main, database, url):
    (sentence,) = main("leases", REDIS_URL=url).sentences

    assert "certificate verify failed: self-signed certificate" in sentence
    assert sentence.endswith("name the authority's file with the option ssl_ca_certs in FORGEKEEPER_REDIS_URL")


def test_a_server_that_requires_a_certificate_says_how_to_name_it(main, database, url, certificate):
    (sentence,) = main("leases", REDIS_URL=f"{url}?ssl_ca_certs={certificate.file}").sentences

    assert sentence.endswith("with the options ssl_certfile and ssl_keyfile in FORGEKEEPER_REDIS_URL")


def test_a_server_of_another_name_is_refused_with_a_remedy(main, database, url, certificate):
    (sentence,) = main("leases", REDIS_URL=url.replace("127.0.0.1", "localhost") + certificate.query).sentences

    assert "write the host that the certificate names into FORGEKEEPER_REDIS_URL" in sentence


@pytest.mark.parametrize("url", ["rediss://127.0.0.1:{}/0"], indirect=True)
def test_a_certificate_that_nobody_vouches_for_is_taken_only_where_a_setting_says_so(main, database, url, certificate):
    unverified = f"{url}{certificate.query}&ssl_cert_reqs=none"

    assert main("leases", REDIS_URL=unverified).status == 2
    assert main("leases", REDIS_URL=unverified, TLS_UNVERIFIED="redis").status == 0


@every(
    "words, remedy",
    [
        ("certificate verify failed: certificate has expired", "renew that server's certificate"),
        ("no Sentinel names a living main: Authentication required", "as the option sentinel_password"),
        ("no Sentinel names a living main: unknown command 'SENTINEL'", "that server is not a Sentinel"),
        ("no Sentinel names a living main: No such master with that name", "from the Sentinels' `sentinel monitor`"),
    ],
)
def test_words_of_redis_have_a_remedy(words, remedy):
    assert remedy in describe_with_remedy(redis.ConnectionError(words))


@every(
    "command, option",
    [*(("leases", one) for one in UNVERIFIED_REDIS), *((one, UNVERIFIED_REDIS[0]) for one in SERVING)],
)
def test_a_redis_that_would_go_unverified_is_refused_at_the_start(main, settings, command, option):
    result = main(command, REDIS_URL=f"rediss://127.0.0.1:1/0?{option}")

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
