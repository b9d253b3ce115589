"""`forgekeeper worker` with slow actors: a program that tests start, with Dramatiq's arguments."""

import sys

from workers.__main__ import run
from workers.broker import broker
from workers.clients import client

from .slow_work import declare

NOTES = "notes"

if __name__ == "__main__":
    declare(broker, client, NOTES, child=True)
    sys.exit(run(sys.argv[1:]))
