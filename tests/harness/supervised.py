"""A command as a process whose supervisor is the test, as systemd is otherwise."""

import socket

from tests.harness.programs import Program


class SupervisedProgram(Program):
    """`forgekeeper <arguments>`, its lines, and what it has told its supervisor."""

    def __init__(self, folder, environment, *arguments):
        self.supervisor = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.supervisor.bind(str(folder / "notify"))
        self.supervisor.setblocking(False)
        self._environment = environment | {"NOTIFY_SOCKET": str(folder / "notify")}
        super().__init__(folder / "log", "-m", "forgekeeper.cli", *arguments, cwd=folder)

    def environment(self):
        return self._environment

    def waits_for(self, what):
        """Return the last line that says so, None where none does."""
        said = [line for line in self.lines() if line["message"] == "not ready, waiting"]
        return said[-1] if said and said[-1]["missing"] == what else None

    def told(self):
        """Return what the supervisor has been told since it asked last."""
        told = []
        try:
            while True:
                told.append(self.supervisor.recv(4096).decode())
        except BlockingIOError:
            return told

    def is_silent(self, seconds):
        """Return whether the supervisor is told nothing for so many seconds."""
        self.told()
        self.supervisor.settimeout(seconds)
        try:
            self.supervisor.recv(4096)
        except TimeoutError:
            return True
        finally:
            self.supervisor.setblocking(False)
        return False

    def kill(self):
        self.supervisor.close()
        super().kill()
