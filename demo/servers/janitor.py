"""The process that removes temporary folders when its parent was killed: PARENT FOLDER…."""

import os
import sys
import time
from pathlib import Path

from demo.servers.folder import remove_when_unused

POLL_INTERVAL = 0.05

if __name__ == "__main__":
    parent, *folders = sys.argv[1:]
    while os.getppid() == int(parent):
        time.sleep(POLL_INTERVAL)
    for folder in folders:
        remove_when_unused(Path(folder))
