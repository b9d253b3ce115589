"""`python -m benchmarks [NAME …]`: one benchmark or all, as a table, and as JSON."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.contest import Benchmark, Figures, Peer, compare
from forgekeeper.embedded import servers

FOLDER = Path(__file__).parent
ROUNDS = 5
out, err = Console(), Console(stderr=True)
app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command()
def main(
    names: Annotated[list[str] | None, typer.Argument(help="Which; by default all.")] = None,
    scale: Annotated[float, typer.Option(min=0.001, help="How much work, by the usual.")] = 1.0,
    rounds: Annotated[int, typer.Option(min=1, help="How often each does it.")] = ROUNDS,
    file: Annotated[Path | None, typer.Option("--json", help="Write the figures here, too.")] = None,
) -> None:
    """Do the same work as our peers, in turns, and print how we compare."""
    modules = [import_module(f"benchmarks.{module.name}") for module in iter_modules([str(FOLDER)])]
    with servers() as running:
        made = [one for each in modules if hasattr(each, "benchmarks") for one in each.benchmarks(running, scale)]
        known: dict[str, Benchmark] = {one.name: one for one in made}
        if unknown := set(names or ()) - known.keys():
            err.print(f"there is no benchmark {', '.join(sorted(unknown))}; there are: {', '.join(known)}")
            raise typer.Exit(2)
        found = [(known[name], _measured(known[name], rounds)) for name in names or known]
    out.print(_table(found))
    if file is not None:
        facts = {"scale": scale, "rounds": rounds, "benchmarks": {one.name: _facts(one, its) for one, its in found}}
        file.write_text(json.dumps(facts, indent=2))


def _measured(benchmark: Benchmark, rounds: int) -> Figures:
    def told(number: int) -> None:
        err.print(f"{benchmark.name}: round {number} of {rounds}")

    return compare(benchmark, rounds=rounds, told=told)


def _table(found: list[tuple[Benchmark, Figures]]) -> Table:
    table = Table("benchmark", "unit", "ours", "beside", "its", "ratio", "wanted", title="medians, and least to most")
    for benchmark, figures in found:
        for peer in benchmark.peers:
            first = peer is benchmark.peers[0]
            ours = (benchmark.name, benchmark.unit, _spread(figures.ours)) if first else ("", "", "")
            table.add_row(*ours, peer.name, *_compared(benchmark, peer, figures))
    return table


def _compared(benchmark: Benchmark, peer: Peer, figures: Figures) -> tuple[str, str, str]:
    if why := figures.missing.get(peer.name):
        return "missing", why, ""
    ratio, ratios = figures.ratio(peer.name), figures.ratios(peer.name)
    wanted = f"{'≤' if benchmark.less else '≥'} {peer.target:g}"
    return (
        _spread(figures.peers[peer.name]),
        f"{ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        wanted if _met(benchmark, peer, ratio) else f"{wanted}, missed",
    )


def _met(benchmark: Benchmark, peer: Peer, ratio: float) -> bool:
    return ratio <= peer.target if benchmark.less else ratio >= peer.target


def _spread(figures: list[float]) -> str:
    return f"{_number(median(figures))} ({_number(min(figures))} to {_number(max(figures))})"


def _number(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"


def _facts(benchmark: Benchmark, figures: Figures) -> dict[str, Any]:
    peers = {peer.name: _of_peer(benchmark, peer, figures) for peer in benchmark.peers}
    return {"unit": benchmark.unit, "less": benchmark.less, "ours": figures.ours, "peers": peers}


def _of_peer(benchmark: Benchmark, peer: Peer, figures: Figures) -> dict[str, Any]:
    if why := figures.missing.get(peer.name):
        return {"missing": why}
    ratio = figures.ratio(peer.name)
    return {
        "figures": figures.peers[peer.name],
        "ratios": figures.ratios(peer.name),
        "ratio": ratio,
        "target": peer.target,
        "met": _met(benchmark, peer, ratio),
    }


if __name__ == "__main__":
    app()
