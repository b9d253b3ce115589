"""`forgekeeper worker` with slow actors: a program that tests start, with Dramatiq's arguments."""

import sys

from forgekeeper.connections import client
from forgekeeper.delivery.broker import broker
from forgekeeper.process.__main__ import run

from .slow_work import declare

NOTES = "notes"

if __name__ == "__main__":
    declare(broker, client, NOTES, child=True)
    sys.exit(run(sys.argv[1:]))
