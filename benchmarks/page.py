"""Write the table of docs/performance.md from files of figures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.reporting import Facts, ratios, spread, wanted

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
BEGIN, END = "<!-- figures: written by python -m benchmarks --page -->", "<!-- end of figures -->"
COLUMNS = "benchmark", "scale, rounds", "ours", "peer", "its figure", "ratio (least to most)", "target"
HEAD = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


def read(files: list[Path]) -> dict[str, Facts]:
    """Return the benchmarks of all *files* with date and machine; later files win."""
    benchmarks: dict[str, Facts] = {}
    for file in files:
        run = json.loads(file.read_text())
        about = {"where": _said(run["date"], run["machine"]), "size": f"{run['scale']:g}, {run['rounds']}"}
        benchmarks |= {name: found | about for name, found in run["benchmarks"].items()}
    return benchmarks


def write(benchmarks: dict[str, Facts], page: Path = PAGE) -> None:
    """Write the table between the marks of the *page*."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text("\n".join([before + BEGIN, *_table(benchmarks), END + after]))


def _table(benchmarks: dict[str, Facts]) -> Iterator[str]:
    for where in dict.fromkeys(found["where"] for found in benchmarks.values()):
        yield f"\n{where}\n\n{HEAD}"
        for name, found in benchmarks.items():
            if found["where"] == where:
                yield from _rows(name, found)
    yield ""


def _said(date: str, machine: dict[str, Any]) -> str:
    """Describe date and machine of the figures."""
    what = ", ".join(f"{name} {number}" for name, number in machine.items() if name not in ABOUT)
    return (
        f"{date[:10]}, {machine['cores']} cores of {machine['model']}, {machine['memory_gb']:g} GB,"
        f" kernel {machine['kernel']}; {what}:"
    )


ABOUT = ("cores", "model", "memory_gb", "kernel")


def _rows(name: str, found: Facts) -> Iterator[str]:
    if why := found.get("failed") or found.get("missing"):
        yield f"| `{name}` | {found['size']} | {'failed' if 'failed' in found else 'missing'}: {why} | | | | |"
        return
    ours = f"`{name}` | {found['size']} | {spread(found['ours'])} {found['unit']}"
    for peer, its in found["peers"].items():
        if why := its.get("missing"):
            yield f"| {ours} | {peer} | missing: {why} | | {wanted(found, its)} |"
        else:
            judged = wanted(found, its) if its["met"] else f"{wanted(found, its)}: **missed**"
            yield f"| {ours} | {peer} | {spread(its['figures'])} | {ratios(its)} | {judged} |"
        ours = " | | "
