"""A terminal for commands, and somebody who types."""

import os
import pty
import subprocess
import sys
from contextlib import suppress

LIMIT = 60


def on_a_terminal(environment, keys, *arguments):
    """Run a command as a person does; return its exit status and what was on the screen."""
    ours, its = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "forgekeeper.cli", *arguments], env=environment, stdin=its, stdout=its, stderr=its
    ) as process:
        os.close(its)
        os.write(ours, keys.encode())
        screen = b""
        # A terminal whose other end is closed is an error to read.
        with suppress(OSError):
            while read := os.read(ours, 4096):
                screen += read
        os.close(ours)
        return process.wait(LIMIT), screen.decode()
