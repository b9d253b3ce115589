"""What this process has counted, for the endpoint that shows all processes of a worker together."""

from __future__ import annotations

from metrics.instruments import Instruments

WORKER = Instruments("worker")
