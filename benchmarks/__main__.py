"""`python -m benchmarks [NAME …]`: results as a table, JSON, pictures, and a page."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from time import monotonic
from types import ModuleType
from typing import Annotated

import typer

from benchmarks import machine, page, pictures
from benchmarks.contest import Benchmark, Missing, compare
from benchmarks.reporting import Facts, facts, lines
from demo.servers import Servers, run_servers
from metrics import logs

FOLDER = Path(__file__).parent
ROUNDS = 5
NOWHERE = Servers(Path(), "", "", 0, 0)
"""Placeholder: benchmarks are declared without servers and measured with servers."""
app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command()
def main(
    names: Annotated[list[str] | None, typer.Argument(help="Which; by default all.")] = None,
    *,
    scale: Annotated[float, typer.Option(min=0.001, help="How much work; 1 is the full size, hours of it.")] = 1.0,
    rounds: Annotated[int, typer.Option(min=1, help="How often each does it.")] = ROUNDS,
    file: Annotated[Path | None, typer.Option("--json", help="Write the figures here, too.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Draw the curves as PNG into it.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the benchmarks, and measure nothing.")] = False,
    of: Annotated[
        list[Path] | None,
        typer.Option("--page", help="Measure nothing: write docs/performance.md's table from such a JSON; repeatable."),
    ] = None,
) -> None:
    """Do the same work as our peers, in turns, and print the ratios.

    The exit status is 1 if a benchmark failed: it raised an error, or its result was wrong.  A missed target is only
    reported.
    """
    _require(plot)
    if of:
        _from_files(of, plot)
        return
    known = declared(NOWHERE, scale)
    if unknown := set(names or ()) - known.keys():
        _tell(f"there is no benchmark {', '.join(sorted(unknown))}; there are: {', '.join(known)}")
        raise typer.Exit(2)
    if listed:
        for name, one in _chosen(known, names).items():
            typer.echo(f"{name:<28}  {one.about}")
        return
    with run_servers() as running:
        found: Facts = {"date": machine.date(running), "machine": machine.described(running)}
    found |= {"scale": scale, "rounds": rounds, "benchmarks": {}}
    for module in _list_modules():
        if chosen := _chosen(_declared_in(module, NOWHERE, scale), names):
            # On servers of its own: a benchmark must not need what another one has made.
            with run_servers() as running:
                mine = _declared_in(module, running, scale)
                found["benchmarks"] |= measured({name: mine[name] for name in chosen}, rounds)
    report(found, file, plot)


def _require(plot: Path | None) -> None:
    try:
        if plot is not None:
            pictures.require()
    except Missing as error:
        _tell(str(error))
        raise typer.Exit(2) from None


def _from_files(files: list[Path], plot: Path | None) -> None:
    benchmarks = page.read(files)
    page.write(benchmarks)
    if plot is not None:
        pictures.draw(benchmarks, plot)


def declared(running: Servers, scale: float) -> dict[str, Benchmark]:
    """Return the benchmarks of all modules by name, each with a sentence about it."""
    known: dict[str, Benchmark] = {}
    for module in _list_modules():
        for name, one in _declared_in(module, running, scale).items():
            assert name not in known, f"two benchmarks are called {name}"
            known[name] = one
    return known


def _list_modules() -> Iterator[ModuleType]:
    for found in iter_modules([str(FOLDER)]):
        if found.name != "__main__" and hasattr(module := import_module(f"benchmarks.{found.name}"), "benchmarks"):
            yield module


def _declared_in(module: ModuleType, running: Servers, scale: float) -> dict[str, Benchmark]:
    sentence = _sentence(module.__doc__)
    return {one.name: replace(one, about=one.about or sentence) for one in module.benchmarks(running, scale)}


def _chosen(known: dict[str, Benchmark], names: list[str] | None) -> dict[str, Benchmark]:
    return {name: one for name, one in known.items() if not names or name in names}


def _sentence(document: str | None) -> str:
    return " ".join((document or "").partition("\n\n")[0].split())


def measured(declared: Mapping[str, Benchmark], rounds: int) -> dict[str, Facts]:
    """Return the results; a benchmark that raises has failed, and the others continue."""
    return {name: _measure(benchmark, rounds) for name, benchmark in declared.items()}


def _measure(benchmark: Benchmark, rounds: int) -> Facts:
    began = monotonic()

    def told(number: int) -> None:
        nonlocal began
        _tell(f"{benchmark.name}: round {number} of {rounds}, {monotonic() - began:.1f} s")
        began = monotonic()

    try:
        return facts(benchmark, compare(benchmark, rounds=rounds, told=told))
    except Missing as error:
        return {"missing": str(error)}
    except Exception as error:  # noqa: BLE001, it is said, and the exit status says it, too
        _tell(f"{benchmark.name}: failed")
        _tell(traceback.format_exc())
        return {"failed": f"{type(error).__name__}: {error}"}


def report(found: Facts, file: Path | None, plot: Path | None) -> None:
    """Print, write and draw the results; raise `typer.Exit` if a benchmark failed."""
    benchmarks = found["benchmarks"]
    for name, its in benchmarks.items():
        for line in lines(name, its):
            typer.echo(line)
    if file is not None:
        file.write_text(json.dumps(found, indent=2) + "\n")
    if plot is not None:
        pictures.draw(benchmarks, plot)
    if any("failed" in its for its in benchmarks.values()):
        raise typer.Exit(1)


def _tell(line: str) -> None:
    typer.echo(line, err=True)


if __name__ == "__main__":
    # A contestant in this process logs as a worker does, but only errors are of interest.
    logs.configure("json", "ERROR", sys.stderr)
    app()
