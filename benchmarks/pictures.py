"""Curves as PNG, drawn from JSON."""

from __future__ import annotations

from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from benchmarks.contest import Missing
from benchmarks.reporting import Facts

DOTS = 80
"""Dots per inch of a picture of seven by four inches: files stay small."""


def require() -> None:
    """Raise `Missing` if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise Missing("matplotlib draws the curves and is not installed: pip install forgekeeper[bench]")


def draw(benchmarks: dict[str, Facts], folder: Path) -> list[Path]:
    """Draw each curve's picture as PICTURE.png in *folder*; return the files."""
    pictures: dict[str, list[Facts]] = defaultdict(list)
    for found in benchmarks.values():
        if found.get("curve", {}).get("points"):
            pictures[found["curve"]["picture"]].append(found)
    folder.mkdir(parents=True, exist_ok=True)
    return [_picture(name, found, folder / f"{name}.png") for name, found in pictures.items()]


def _picture(name: str, benchmarks: list[Facts], file: Path) -> Path:
    require()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=DOTS, layout="constrained")
    axes = figure.add_subplot()
    for found in benchmarks:
        at: dict[float, list[float]] = defaultdict(list)
        for size, cost in found["curve"]["points"]:
            at[size].append(cost)
        sizes = sorted(at)
        middle = [median(at[size]) for size in sizes]
        least = [mid - min(at[size]) for size, mid in zip(sizes, middle, strict=True)]
        most = [max(at[size]) - mid for size, mid in zip(sizes, middle, strict=True)]
        axes.errorbar(sizes, middle, yerr=(least, most), label=found["curve"]["line"], marker="o", capsize=3)
    axes.set(title=name, xlabel="records", ylabel=benchmarks[0]["unit"], xscale="log")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file)
    return file
