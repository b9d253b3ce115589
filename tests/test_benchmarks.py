"""Benchmarks compare like with like; how fast anything is, is none of a test's business."""

import subprocess
import sys
from pathlib import Path

from benchmarks.contest import Benchmark, Missing, Peer, compare

ROOT = Path(__file__).parent.parent


def turn(order, name, figures):
    left = iter(figures)

    def measure():
        order.append(name)
        return next(left)

    return measure


def benchmark(order, ours, **peers):
    beside = tuple(Peer(name, turn(order, name, figures), 1.0) for name, figures in peers.items())
    return Benchmark("a", "things/s", turn(order, "ours", ours), beside)


def test_contestants_take_turns_and_each_is_first_as_often_as_the_others():
    order = []

    compare(benchmark(order, [1.0] * 3, one=[1.0] * 3, other=[1.0] * 3), rounds=3)

    assert order == ["ours", "one", "other", "one", "other", "ours", "other", "ours", "one"]


def test_the_ratio_is_the_median_of_the_rounds_ratios():
    figures = compare(benchmark([], [2.0, 9.0, 3.0], peer=[1.0, 1.0, 3.0]), rounds=3)

    assert (figures.ratios("peer"), figures.ratio("peer")) == ([2.0, 9.0, 1.0], 2.0)


def test_a_peer_that_is_missing_is_said_to_be_and_the_others_go_on():
    def missing():
        raise Missing("there is no sidekiq; install ruby-sidekiq")

    peers = (Peer("absent", missing, 1.0), Peer("present", lambda: 2.0, 1.0))

    figures = compare(Benchmark("a", "things/s", lambda: 4.0, peers), rounds=2)

    assert figures.missing == {"absent": "there is no sidekiq; install ruby-sidekiq"}
    assert figures.peers == {"present": [2.0, 2.0]}


def test_an_unknown_benchmark_is_named_beside_those_that_there_are():
    command = [sys.executable, "-m", "benchmarks", "mesages"]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert "no benchmark mesages; there are: audit, audit_people, audit_processor, " in done.stderr
