"""The table of docs/performance.md, written from files of figures, so that nobody copies a number by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.reporting import Facts, spread, wanted

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
BEGIN, END = "<!-- figures: written by python -m benchmarks --page -->", "<!-- end of figures -->"
HEAD = "| benchmark | ours | beside | its | ratio (least to most) | wanted |\n|---|---|---|---|---|---|"


def read(files: list[Path]) -> dict[str, Facts]:
    """Return the benchmarks of all *files*, each with its run's date and machine; a later file's takes the place."""
    benchmarks: dict[str, Facts] = {}
    for file in files:
        run = json.loads(file.read_text())
        about = {key: run[key] for key in ("date", "machine", "scale", "rounds")}
        benchmarks |= {name: found | {"run": about} for name, found in run["benchmarks"].items()}
    return benchmarks


def write(benchmarks: dict[str, Facts], page: Path = PAGE) -> None:
    """Put the table between the marks of the *page*."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text("\n".join([before + BEGIN, *_table(benchmarks), END + after]))


def _table(benchmarks: dict[str, Facts]) -> Iterator[str]:
    runs: dict[str, list[str]] = {}
    for name, found in benchmarks.items():
        runs.setdefault(json.dumps(found["run"]), []).append(name)
    for run, names in runs.items():
        yield f"\n{_said(json.loads(run))}\n\n{HEAD}"
        for name in names:
            yield from _rows(name, benchmarks[name])
    yield ""


def _said(run: dict[str, Any]) -> str:
    """Say when, where and how the figures were measured."""
    machine = run["machine"]
    what = ", ".join(f"{name} {number}" for name, number in machine.items() if name not in ABOUT)
    return (
        f"{run['date'][:10]}, {machine['cores']} cores of {machine['model']}, {machine['memory_gb']:g} GB,"
        f" kernel {machine['kernel']}; {what}; `--scale {run['scale']:g} --rounds {run['rounds']}`:"
    )


ABOUT = ("cores", "model", "memory_gb", "kernel")


def _rows(name: str, found: Facts) -> Iterator[str]:
    if why := found.get("failed") or found.get("missing"):
        yield f"| `{name}` | {'failed' if 'failed' in found else 'missing'}: {why} | | | | |"
        return
    ours = f"`{name}` | {spread(found['ours'])} {found['unit']}"
    for peer, its in found["peers"].items():
        if why := its.get("missing"):
            yield f"| {ours} | {peer} | missing: {why} | | {wanted(found, its)} |"
        else:
            ratio = f"{its['ratio']:.2f} ({min(its['ratios']):.2f} to {max(its['ratios']):.2f})"
            judged = wanted(found, its) if its["met"] else f"{wanted(found, its)}: **missed**"
            yield f"| {ours} | {peer} | {spread(its['figures'])} | {ratio} | {judged} |"
        ours = " | "
