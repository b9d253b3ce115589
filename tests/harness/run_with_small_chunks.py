"""`forgekeeper run stale_direct_uploads` with chunks of a few uploads: a program that tests start."""

import sys

from forgekeeper.cli import main
from workers import stale_direct_uploads

stale_direct_uploads.ENTRIES_PER_CHUNK = int(sys.argv[1])
sys.argv[1:] = ["run", "stale_direct_uploads"]
main()
