"""The dashboards as Grafana reads them: a file of JSON each."""

from __future__ import annotations

from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from metrics.dashboards.batch import batch
from metrics.dashboards.overview import overview

FOLDER = Path(__file__).parent.parent.parent / "deploy" / "grafana" / "dashboards"


def written() -> dict[Path, str]:
    """Return the text of every file."""
    encoder = JSONEncoder(indent=2, sort_keys=True, ensure_ascii=False)
    return {FOLDER / f"{made.uid}.json": f"{encoder.encode(made)}\n" for made in (overview(), batch())}
