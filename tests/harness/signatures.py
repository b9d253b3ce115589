"""Check S3 signatures with botocore, which the product does not use."""

from urllib.parse import parse_qsl, urlsplit

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials


def is_signed(command, target, headers, body, secret):
    """Return whether the header `Authorization` proves that the sender knows the secret."""
    fields = dict(part.split("=", 1) for part in headers["Authorization"].partition(" ")[2].split(", "))
    key_id, _day, region, *_ = fields["Credential"].split("/")
    names = fields["SignedHeaders"].split(";")
    sent = {name.lower() for name in headers}
    if any(name.startswith("x-amz-") or name == "content-md5" for name in sent - {*names}):
        return False
    parts = urlsplit(target)
    request = AWSRequest(
        method=command,
        url=f"http://{headers['Host']}{parts.path}",
        params=dict(parse_qsl(parts.query, keep_blank_values=True)),
        headers={name: headers[name] for name in names},
        data=body,
    )
    request.context["timestamp"] = headers["x-amz-date"]
    auth = S3SigV4Auth(Credentials(key_id, secret), "s3", region)
    wanted = auth.string_to_sign(request, auth.canonical_request(request))
    return auth.signature(wanted, request) == fields["Signature"]
