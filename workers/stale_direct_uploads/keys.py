"""The keys of the register of direct uploads in Redis, and its times (batch 100)."""

from __future__ import annotations

from datetime import timedelta

from forgekeeper.platform.coordination.values import DECLARED

PENDING = "{pending_direct_uploads}:pending"
DELETING = "{pending_direct_uploads}:deleting"
FAILED = "{pending_direct_uploads}:failed"
ATTEMPTS = "{pending_direct_uploads}:attempts"
CLAIMS = "{pending_direct_uploads}:claims"
ADOPTED = "{pending_direct_uploads}:adopted"
"""What `uploads reconcile` has registered, not a producer; an entry stays in it until it is settled."""
CURSOR = "{pending_direct_uploads}:cursor"
"""Where the last move out of the forge's own register has ended."""
DECLARED.update(dict.fromkeys((PENDING, DELETING, FAILED, ADOPTED), "zset") | dict.fromkeys((ATTEMPTS, CLAIMS), "hash"))
EPOCH = "{pending_direct_uploads}:epoch"
"""Tells Redis from another server, and from itself after it was emptied."""
DECLARED.update(dict.fromkeys((CURSOR, EPOCH), "string"))

REFERENCE = "pending_direct_uploads"
"""The hash in which the forge itself registers uploads, which is read where `bridge.bridges` says so."""

MAX_UPLOAD_DURATION = timedelta(hours=3)
# Redis compares whole seconds: only from one more on is it surely longer than three hours.
DUE_AT_AGE = int(MAX_UPLOAD_DURATION.total_seconds()) + 1
"""How many seconds past its registration an upload is due."""
LONGEST_AHEAD = timedelta(days=1)
"""No entry waits longer for its next attempt, or to be withdrawn: what lies further ahead has a wrong time."""
PAGE = 1_000
"""Entries in one command, which takes about a millisecond of the server."""
