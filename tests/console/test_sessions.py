"""How long a session lasts, by the console's own clock."""

from forgekeeper.cli.console.access import EndedSessions
from forgekeeper.cli.console.named_lines import LineFile
from forgekeeper.cli.console.users import USER_FORMAT, User, hash_password
from tests.harness.console import Console
from tests.harness.ports import free_ports
from tests.harness.programs import eventually

PASSWORD = "correct horse"
LATER = """
import pathlib, time, itsdangerous
later = pathlib.Path("later")
itsdangerous.TimestampSigner.get_timestamp = lambda _: int(time.time()) + int(later.read_text())
from forgekeeper.cli import main
main()
"""
"""The console, whose clock is ahead by the seconds in a file."""


def test_a_session_ends_after_twelve_hours_whatever_the_browser_keeps(database, tmp_path):
    users, later, (port,) = LineFile(tmp_path / "users", USER_FORMAT), tmp_path / "later", free_ports(1)
    with users.edit_lines() as known:
        known["anna"] = User("anna", "operator", hash_password(PASSWORD))
    later.write_text("0")
    given = {"console_port": port, "console_users": users.path, "cwd": tmp_path}
    (program := tmp_path / "console.py").write_text(LATER)
    console = Console(tmp_path / "log", str(program), "console", **given)
    try:
        eventually(console.ready)
        cookie, found = console.log_in("anna", PASSWORD), {}
        for seconds in (43_000, 43_300):
            later.write_text(str(seconds))
            found[seconds] = console.get("/", Cookie=cookie).status
    finally:
        console.kill()

    assert found == {43_000: 200, 43_300: 303}


def test_an_ended_session_is_known_however_many_others_end_and_until_its_cookie_expires():
    now = [0.0]
    ended = EndedSessions(60, clock=lambda: now[0])
    for number in range(2000):
        ended.add(str(number))
    known = {str(number) in ended for number in range(2000)}

    now[0] = 61.0
    ended.add("another")

    assert (known, "0" in ended, "another" in ended) == ({True}, False, True)
