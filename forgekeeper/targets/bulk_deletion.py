"""Delete up to a thousand objects by one request to S3, and read its answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from xml.sax.saxutils import escape

from forgekeeper.targets.s3_requests import S3Requests, parse_xml

MAX_KEYS_PER_REQUEST = 1_000
"""Amazon's limit."""


async def delete_in_bulk(
    requests: S3Requests, paths: Sequence[str], meanwhile: Callable[[], None] = lambda: None
) -> set[str]:
    """Delete the objects at *paths*; return the paths that the answer names as deleted.

    Calls *meanwhile* when the request has been sent, before the answer is read.
    The state of the other objects is unknown.  Some stores name only a part of the keys, or none as if for `Quiet`.
    Raises OSError or ValueError if the answer is an error or cannot be read; objects may be deleted all the same.
    """
    keys = {f"{requests.prefix}{path}": path for path in paths}
    objects = "".join(f"<Object><Key>{escape(key)}</Key></Object>" for key in keys)
    body = f'<Delete xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{objects}<Quiet>false</Quiet></Delete>'
    answered = await requests.send("POST", {"delete": None}, body=body.encode(), meanwhile=meanwhile)
    answer = parse_xml(answered.body, "DeleteResult")
    failed = {error.findtext("Key") for error in answer.iterfind("Error")}
    deleted = {one.findtext("Key") for one in answer.iterfind("Deleted")} - failed
    return {path for key, path in keys.items() if key in deleted}
