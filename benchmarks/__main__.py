"""`python -m benchmarks [NAME …]`: one benchmark or all, as a table, and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import audit, audit_lookup, breaker, messages
from benchmarks.pairing import Figures, Pair, compare
from forgekeeper.embedded import servers

ROUNDS = 5
MODULES = (messages, audit, audit_lookup, breaker)
out, err = Console(), Console(stderr=True)
app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command()
def main(
    names: Annotated[list[str] | None, typer.Argument(help="Which; by default all.")] = None,
    scale: Annotated[float, typer.Option(min=0.001, help="How much work, by the usual.")] = 1.0,
    rounds: Annotated[int, typer.Option(min=1, help="How often each does it.")] = ROUNDS,
    file: Annotated[Path | None, typer.Option("--json", help="Write the figures here, too.")] = None,
) -> None:
    """Do the same work as a peer, in turns, and print how much faster or slower we are."""
    with servers() as running:
        pairs = {pair.name: pair for module in MODULES for pair in module.pairs(running, scale)}
        if unknown := set(names or ()) - pairs.keys():
            err.print(f"there is no benchmark {', '.join(sorted(unknown))}; there are: {', '.join(pairs)}")
            raise typer.Exit(2)
        found = {name: _measured(pairs[name], rounds) for name in names or pairs}
    out.print(_table([(pairs[name], figures) for name, figures in found.items()]))
    if file is not None:
        file.write_text(json.dumps({name: _facts(pairs[name], figures) for name, figures in found.items()}, indent=2))


def _measured(pair: Pair, rounds: int) -> Figures:
    return compare(pair, rounds=rounds, told=lambda number: err.print(f"{pair.name}: round {number} of {rounds}"))


def _table(rows: list[tuple[Pair, Figures]]) -> Table:
    table = Table("benchmark", "ours", "peer", "", "ratio", "wanted", title="medians, and least to most")
    for pair, figures in rows:
        table.add_row(
            pair.name,
            f"{_spread(figures.ours)} {pair.unit}/s",
            f"{_spread(figures.peers)} {pair.unit}/s",
            pair.peers_name,
            f"{figures.ratio:.2f} ({min(figures.ratios):.2f} to {max(figures.ratios):.2f})",
            f"≥ {pair.target:g}" + ("" if figures.ratio >= pair.target else ", missed"),
        )
    return table


def _spread(rates: list[float]) -> str:
    return f"{median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"


def _facts(pair: Pair, figures: Figures) -> dict[str, Any]:
    return {
        "unit": f"{pair.unit}/s",
        "peer": pair.peers_name,
        "target": pair.target,
        "ratio": figures.ratio,
        "ratios": figures.ratios,
        "ours": figures.ours,
        "peers": figures.peers,
    }


if __name__ == "__main__":
    app()
