"""Bare repositories for tests, and programs that replace git to simulate its failures."""

import atexit
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from forgekeeper.targets import git_command, git_refs, sentinel
from forgekeeper.targets.git_refs import RefToDelete
from tests.harness.installation import INSTALLATION
from tests.harness.waiting import wait_until

ALWAYS_IN_TIME = 60.0
HISTORY = b"""\
commit refs/heads/main
committer A <a@example.org> 1700000000 +0000
data 3
one
commit refs/heads/two
committer A <a@example.org> 1700000001 +0000
data 3
two
"""


@cache
def _made(options):
    """Create a repository as a template: copying it is faster than five git commands."""
    folder = TemporaryDirectory(prefix="forgekeeper-bare-")
    atexit.register(folder.cleanup)
    path = Path(folder.name, "made.git")

    def git(*words, given=b""):
        return subprocess.run(["git", *words], input=given, capture_output=True, check=True).stdout.decode()

    git("init", "--quiet", "--bare", "--template=", "--initial-branch=main", *options, path)
    own = f"--git-dir={path}"
    git(own, "fast-import", "--quiet", given=HISTORY)
    (path / "values").write_text(git(own, "rev-parse", "main") + git(own, "rev-parse", "two"))
    git(own, "update-ref", "-d", "refs/heads/two")
    return path


class BareRepository:
    """A bare repository *disk_path* below *root*, with two commits and the branch main."""

    def __init__(self, root, disk_path="group/project.git", *options):
        self.root = root
        self.disk_path = disk_path
        self.path = root / disk_path
        shutil.copytree(_made(options), self.path)
        self.one, self.two = (self.path / "values").read_text().split()
        (self.path / "values").unlink()

    def git(self, *arguments, given=b""):
        command = ["git", f"--git-dir={self.path}", *arguments]
        done = subprocess.run(command, input=given, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.decode().strip()

    def loose(self, *names, value=None):
        for name in names:
            file = self.path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text((self.one if value is None else value) + "\n")

    def leave_format_to_git(self):
        """Add a section to the configuration, so that only git knows the format of the repository."""
        with (self.path / "config").open("a") as config:
            config.write("[extensions]\n")

    def packed(self, *names):
        """Replace the packed refs by these."""
        lines = [f"{self.one} {name}\n".encode() for name in names]
        lines.sort(key=lambda line: line.split(b" ", 1)[1])
        (self.path / "packed-refs").write_bytes(b"# pack-refs with: peeled fully-peeled sorted \n" + b"".join(lines))

    def refs(self):
        """Read the refs from the files, without git; return each value or text by name."""
        packed = self.path / "packed-refs"
        lines = packed.read_text().splitlines() if packed.exists() else []
        found = dict(line.split(" ", 1)[::-1] for line in lines if line[0] not in "#^")
        for folder, _folders, files in os.walk(self.path / "refs"):
            for file in files:
                found[str(Path(folder, file).relative_to(self.path))] = Path(folder, file).read_text().strip()
        return found

    def locks(self):
        return [path for path in self.path.rglob("*") if path.name.endswith((".lock", ".new"))]

    def delete(self, *doomed, within=ALWAYS_IN_TIME, **options):
        rows = [RefToDelete(row) if isinstance(row, str) else row for row in doomed]
        return git_refs.delete_refs(self.root, self.disk_path, rows, until=time.monotonic() + within, **options)

    def states(self, *doomed, **options):
        """Delete refs; return the state of each by its name."""
        return {row.ref: outcome.state for row, outcome in self.delete(*doomed, **options).items()}


def put_root(path):
    path.mkdir(parents=True)
    (path / sentinel.SENTINEL_NAME).write_bytes(sentinel.build_content(INSTALLATION))
    return path


def find_git_processes(root):
    """Return the ids of all git processes that delete refs below *root*."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            command = (process / "cmdline").read_bytes() if process.name.isdigit() else b""
        except (FileNotFoundError, ProcessLookupError):
            continue
        if b"update-ref" in command and f"--git-dir={root}".encode() in command:
            found.append(int(process.name))
    return found


def shorten_lock_timeouts(monkeypatch):
    """Let git wait only 10 ms for a lock, for tests whose lock is never released."""
    options = [re.sub(r"(?<=Timeout=)\d+", "10", option) for option in git_command._OPTIONS]
    monkeypatch.setattr(git_command, "_OPTIONS", options)


def replace_git(folder, monkeypatch, script):
    """Put a program named git first on the PATH; in *script* $GIT is the real git."""
    real = shutil.which("git")
    folder.mkdir()
    program = folder / "git"
    program.write_text(f"#!/bin/sh\nGIT={real}\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


REFUSING = """
import os, re, subprocess, sys
git, pattern, complaint = {git!r}, {pattern!r}, {complaint!r}
command = [git, *sys.argv[1:]]
if "update-ref" not in command:
    os.execv(git, command)
given = b""
while not given.endswith(b"prepare\\0"):
    given += os.read(0, 65536)
if found := re.search(b"delete (" + pattern.encode() + b"[^\\0]*)", given):
    sys.exit(complaint.format(found[1].decode()))
with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
    process.stdin.write(given)
    process.stdin.flush()
    process.stdin.write(os.read(0, 65536))
sys.exit(process.returncode)
"""


def refuse_refs(folder, monkeypatch, pattern, complaint):
    """Make git refuse to delete refs whose names begin with *pattern*; {0} in the complaint is the name."""
    program = folder / "refusing.py"
    replace_git(folder, monkeypatch, f'exec {sys.executable} -S -E {program} "$@"')
    real = shutil.which("git", path=os.environ["PATH"].split(os.pathsep, 1)[1])
    program.write_text(REFUSING.format(git=real, pattern=pattern, complaint=complaint))


@contextmanager
def while_git_waits(folder, monkeypatch, work):
    """Run *work* in a thread, and the block while its git waits before it changes refs; yield the future of *work*."""
    os.mkfifo(folder / "go")
    wait = f"[ -e {folder}/waits ] || {{ touch {folder}/waits; read -r _ < {folder}/go; }}"
    replace_git(folder / "bin", monkeypatch, f'case "$*" in *update-ref*) {wait};; esac\nexec $GIT "$@"')
    with ThreadPoolExecutor() as thread:
        doing = thread.submit(work)
        try:
            assert wait_until((folder / "waits").exists, ALWAYS_IN_TIME)
            yield doing
        finally:
            (folder / "go").write_text("go\n")
