"""Real processes, started as an operator starts them, and always stopped."""

from collections import defaultdict

import pytest

from tests.harness.git_samples import find_git_processes, put_root
from tests.harness.waiting import wait_until

from .matrix import Outcome, table
from .service import Service

LAST_LINES = 6
LINE = 400
PATIENCE = 60.0


@pytest.fixture
def services(request, settings, tmp_path):
    """Start commands, and kill the remaining processes at the end."""
    started = request.node.services = []

    def start(name, *arguments, module="forgekeeper.cli", **settings):
        started.append(Service(name, arguments, tmp_path, settings, module))
        started[-1].start()
        return started[-1]

    yield start
    for service in started:
        service.kill()


@pytest.fixture
def root(fast_folder):
    """Create a root of repositories; at the end wait until no git works in it."""
    root = put_root(fast_folder / "repositories")
    yield root
    # Git survives a worker that is killed, and continues to create and delete its files.
    assert wait_until(lambda: not find_git_processes(root), PATIENCE)


@pytest.fixture
def outcome(record_property):
    """Record the outcome of a fault for the table; *recovery* in seconds each, `inf` for never."""

    def note(fault, *, injected, violations=0, recovery=(), duplicates=0):
        record_property("outcome", (fault, injected, violations, list(recovery), duplicates))

    return note


@pytest.fixture
def say(record_property):
    """Record sentences of a test for the end of the output."""

    def note(*sentences):
        record_property("said", sentences)

    return note


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Show the status and the last lines of each command of a failed test."""
    report = yield
    if report.failed:
        for service in getattr(item, "services", ()):
            title = f"{service.name}, life {service.lives}, status {service.process.poll()}"
            report.sections.append(
                (title, "\n".join(line[:LINE] for line in service.text().splitlines()[-LAST_LINES:]))
            )
    return report


def pytest_terminal_summary(terminalreporter):
    """Print the recorded sentences and the table of faults, from the reports of all processes."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    # The report of the teardown has them, too.
    noted = [
        (report, *one) for report in reports if getattr(report, "when", "") == "call" for one in report.user_properties
    ]
    outcomes = defaultdict(Outcome)
    for report, name, value in noted:
        if name == "said":
            terminalreporter.section(report.nodeid.rpartition("::")[2], "-")
            terminalreporter.write("\n".join([*value, ""]))
        elif name == "outcome":
            outcomes[value[0]].add(*value[1:])
    if outcomes:
        terminalreporter.section("fault matrix")
        terminalreporter.write("\n".join([*table(outcomes), ""]))
