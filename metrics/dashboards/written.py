"""The dashboards as Grafana reads them: a file of JSON each."""

from __future__ import annotations

from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from metrics.dashboards import own
from metrics.dashboards.batch import batch
from metrics.dashboards.overview import overview

FOLDER = Path(__file__).parent.parent.parent / "deploy" / "grafana" / "dashboards"


def written() -> dict[Path, str]:
    """Return the text of every file."""
    text = "".join(map(_encoded, (overview(), batch())))
    return {FOLDER / f"{made.uid}.json": _encoded(made) for made in (overview(), batch(own.rows(text)))}


def _encoded(made: Dashboard) -> str:
    return f"{JSONEncoder(indent=2, sort_keys=True, ensure_ascii=False).encode(made)}\n"
