"""Benchmarks compare like with like; how fast anything is, is none of a test's business."""

from benchmarks.contest import Benchmark, Missing, Peer, compare


def in_turn(order, name, figures):
    left = iter(figures)

    def measure():
        order.append(name)
        return next(left)

    return measure


def test_contestants_take_turns_and_the_ratio_is_the_median_of_the_rounds():
    order = []
    peer = Peer("peer", in_turn(order, "peer", [1.0, 1.0, 3.0]), 1.0)

    figures = compare(Benchmark("a", "things/s", in_turn(order, "ours", [2.0, 9.0, 3.0]), (peer,)), rounds=3)

    assert order == ["ours", "peer", "peer", "ours", "ours", "peer"]
    assert (figures.ratios("peer"), figures.ratio("peer")) == ([2.0, 9.0, 1.0], 2.0)


def test_a_missing_peer_is_named_and_the_others_go_on():
    def missing():
        raise Missing("there is no sidekiq; install ruby-sidekiq")

    peers = Peer("absent", missing, 1.0), Peer("present", lambda: 2.0, 1.0)

    figures = compare(Benchmark("a", "things/s", lambda: 4.0, peers), rounds=2)

    assert figures.missing == {"absent": "there is no sidekiq; install ruby-sidekiq"}
    assert figures.peers == {"present": [2.0, 2.0]}
