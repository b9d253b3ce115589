"""Benchmarks compare like with like; how fast anything is, is none of a test's business."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer

from benchmarks import __main__ as command
from benchmarks import page, pictures
from benchmarks.contest import Benchmark, Curve, Missing, Peer, Point, compare
from benchmarks.reporting import WIDTH, facts, lines

ROOT = Path(__file__).parent.parent
MACHINE = {"cores": 2, "model": "a processor", "memory_gb": 8, "kernel": "6.1", "git": "2.39"}
RUN = {"date": "2026-11-22T22:00:00+00:00", "machine": MACHINE, "scale": 0.5, "rounds": 3}


def turn(order, name, figures):
    left = iter(figures)

    def measure():
        order.append(name)
        return next(left)

    return measure


def benchmark(order, ours, **peers):
    beside = tuple(Peer(name, turn(order, name, figures), 1.0) for name, figures in peers.items())
    return Benchmark("a", "things/s", turn(order, "ours", ours), beside)


def raising(error):
    def measure():
        raise error

    return measure


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def found(ours, peer, target, *, less):
    peers = (Peer("peer", lambda: peer, target),)
    one = Benchmark("a", "s", lambda: ours, peers, less=less)
    return facts(one, compare(one, rounds=1))["peers"]["peer"]


def test_contestants_take_turns_and_each_is_first_as_often_as_the_others():
    order = []

    compare(benchmark(order, [1.0] * 3, one=[1.0] * 3, other=[1.0] * 3), rounds=3)

    assert order == ["ours", "one", "other", "one", "other", "ours", "other", "ours", "one"]


def test_the_ratio_is_the_median_of_the_rounds_ratios():
    figures = compare(benchmark([], [2.0, 9.0, 3.0], peer=[1.0, 1.0, 3.0]), rounds=3)

    assert (figures.ratios("peer"), figures.ratio("peer")) == ([2.0, 9.0, 1.0], 2.0)


def test_a_peer_that_is_missing_is_said_to_be_and_the_others_go_on():
    absent = Peer("absent", raising(Missing("there is no sidekiq; install ruby-sidekiq")), 1.0)
    present = Peer("present", lambda: 2.0, 1.0)

    figures = compare(Benchmark("a", "things/s", lambda: 4.0, (absent, present)), rounds=2)

    assert figures.missing == {"absent": "there is no sidekiq; install ruby-sidekiq"}
    assert figures.peers == {"present": [2.0, 2.0]}


@pytest.mark.parametrize(
    ("ours", "less", "met"), [(1.5, False, True), (1.4, False, False), (1.5, True, True), (1.6, True, False)]
)
def test_a_target_is_the_least_ratio_or_where_less_is_better_the_greatest(ours, less, met):
    assert found(ours, 1.0, 1.5, less=less)["met"] is met


def test_a_benchmark_that_fails_is_said_to_and_the_others_go_on(capsys):
    wrong = Benchmark("wrong", "s", raising(AssertionError("3 of 4 were done")), ())
    broken = Benchmark("broken", "s", raising(OSError("no disk")), ())
    declared = {"wrong": wrong, "broken": broken, "well": benchmark([], [1.0], peer=[2.0])}

    found = command.measured(declared, 1)
    with pytest.raises(typer.Exit) as ending:
        command.report({"benchmarks": found}, None, None)

    assert ending.value.exit_code == 1
    assert [one.get("failed") for one in found.values()] == [
        "AssertionError: 3 of 4 were done",
        "OSError: no disk",
        None,
    ]
    assert "wrong  FAILED: AssertionError: 3 of 4 were done" in capsys.readouterr().out


def test_the_figures_say_when_and_on_what_they_were_measured(tmp_path):
    file = tmp_path / "figures.json"

    done = run("breaker-small", "--scale", "0.02", "--rounds", "1", "--json", str(file))

    facts = json.loads(file.read_text())
    assert done.returncode == 0, done.stderr
    assert (facts["scale"], facts["rounds"], len(facts["benchmarks"]["breaker-small"]["ours"])) == (0.02, 1, 1)
    assert facts["date"].endswith("+00:00")
    assert facts["machine"].keys() >= {
        *("cores", "model", "memory_gb", "kernel", "Python", "PostgreSQL", "Redis", "git"),
    }


def test_no_line_of_what_is_printed_is_wider_than_eighty_columns():
    peers = (
        Peer("a peer with a name that is rather long, as some are", lambda: 1234567.0, 1.25),
        Peer("absent", raising(Missing("there is no such program on this machine; install a-package-of-it")), 1.0),
    )
    one = Benchmark("a", "artifacts/s", lambda: 9876543.0, peers)

    printed = list(lines("a_benchmark_with_quite_a_name", facts(one, compare(one, rounds=2))))

    assert len(printed) > 3
    assert max(map(len, printed)) <= WIDTH


def test_an_unknown_benchmark_is_named_beside_those_that_there_are():
    done = run("mesages")

    assert done.returncode == 2
    assert "no benchmark mesages; there are: " in done.stderr


def test_all_are_listed_with_a_sentence_each():
    done = run("--list")

    listed = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert done.returncode == 0, done.stderr
    assert {"messages", "curve_statuses_outdated", "memory_refs"} <= listed.keys()


@pytest.fixture
def matplotlib():
    if find_spec("matplotlib") is None:
        assert "CI" not in os.environ, "matplotlib is missing: .ci/run installs it"
        pytest.skip("matplotlib is missing: make .venv/.bench")


@pytest.mark.usefixtures("matplotlib")
def test_a_curve_keeps_what_each_size_came_to_and_is_drawn(tmp_path):
    curve = Curve("growth", "vacuumed", [Point(10, 1.0), Point(100, 1.5), Point(10, 2.0)])
    one = Benchmark("a", "µs", lambda: 1.5, (Peer("small", lambda: 1.0, 1.3),), less=True, curve=curve)

    drawn = pictures.draw({"a": facts(one, compare(one, rounds=1))}, tmp_path / "pictures")

    assert drawn == [tmp_path / "pictures" / "growth.png"]
    assert drawn[0].read_bytes().startswith(b"\x89PNG")


def test_where_nothing_can_be_drawn_it_is_said_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    with pytest.raises(typer.Exit) as ending:
        command.main(plot=tmp_path)

    assert ending.value.exit_code == 2
    assert "pip install forgekeeper[bench]" in capsys.readouterr().err


def test_matplotlib_is_imported_by_nothing_but_drawing():
    program = "import sys, benchmarks.__main__; sys.exit('matplotlib' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_a_single_round_has_no_spread():
    one = benchmark([], [3.0], peer=[2.0])

    printed = " ".join(lines("a", facts(one, compare(one, rounds=1)))).split()

    assert printed[:3] == ["a", "3", "things/s"]
    assert "1.50" in printed
    assert "to" not in printed


def test_the_page_is_written_from_files_and_a_later_one_takes_the_place(tmp_path):
    one = benchmark([], [8.0, 8.0, 2.0, 4.0, 3.0], peer=[2.0] * 5)
    for name, rounds in (("first", 2), ("later", 3)):
        figures = {"a": facts(one, compare(one, rounds=rounds))}
        (tmp_path / name).write_text(json.dumps(RUN | {"benchmarks": figures}))
    written = tmp_path / "page.md"
    written.write_text(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n")

    page.write(page.read([tmp_path / "first", tmp_path / "later"]), written)

    text = written.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| `a` | 0.5, 3 | 3 (2 to 4) things/s | peer | 2 (2 to 2) | 1.50 (1.00 to 2.00) | ≥ 1 |" in text
    assert "2026-11-22, 2 cores of a processor, 8 GB, kernel 6.1; git 2.39:" in text
