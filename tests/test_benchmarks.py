"""Benchmarks compare like with like; how fast anything is, is none of a test's business."""

import subprocess
import sys
from pathlib import Path

from benchmarks.pairing import Pair, compare

ROOT = Path(__file__).parent.parent


def pair(order, *, ours, peer):
    def turn(name, rates):
        def measured():
            order.append(name)
            return next(rates)

        return measured

    return Pair("a", "things", turn("ours", iter(ours)), turn("peer", iter(peer)), "somebody", 1.0)


def test_the_two_take_turns_and_each_is_first_as_often_as_the_other():
    order = []

    compare(pair(order, ours=[1.0, 1.0], peer=[1.0, 1.0]), rounds=2)

    assert order == ["ours", "peer", "peer", "ours"]


def test_the_ratio_is_the_median_of_the_rounds_ratios():
    figures = compare(pair([], ours=[2.0, 9.0, 3.0], peer=[1.0, 1.0, 3.0]), rounds=3)

    assert (figures.ratios, figures.ratio) == ([2.0, 9.0, 1.0], 2.0)


def test_an_unknown_benchmark_is_named_beside_those_that_there_are():
    command = [sys.executable, "-m", "benchmarks", "mesages"]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert "no benchmark mesages; there are: messages, metrics, logs, both, audit, " in done.stderr
