"""A certificate for a Redis with TLS and its clients, which is its own authority."""

import os
import shutil
import subprocess
from urllib.parse import urlencode

import pytest


class Certificate:
    """The files of a certificate for 127.0.0.1, which are created in *folder*.

    *server_options* are settings of Redis, which then requires a certificate of its clients.  *client_options* are
    options of redis-py, and *query* the same as the end of a URL.
    """

    def __init__(self, folder):
        if not (shutil.which("redis-server") and shutil.which("openssl")):
            assert "CI" not in os.environ, "redis-server or openssl is missing: .ci/run installs them"
            pytest.skip("redis-server or openssl is not installed")
        key, self.file = str(folder / "key.pem"), str(folder / "certificate.pem")
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
                *("-subj", "/CN=redis", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", self.file),
            ],
            check=True,
            capture_output=True,
        )
        self.server_options = {"tls-cert-file": self.file, "tls-key-file": key, "tls-ca-cert-file": self.file}
        self.client_options = {"ssl_ca_certs": self.file, "ssl_certfile": self.file, "ssl_keyfile": key}
        self.query = f"?{urlencode(self.client_options)}"
