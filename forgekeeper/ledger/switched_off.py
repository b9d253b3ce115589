"""Batches that are switched off, and the time since when."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Literal, NamedTuple

from forgekeeper.api.batches import BATCHES, FeatureFlag
from forgekeeper.ledger.job_runs import JobRun
from forgekeeper.platform.settings.cron import Cron


class SwitchedOffBatch(NamedTuple):
    """A batch that is switched off *by* its cron or flag.

    *since* is None if it was never registered.
    """

    batch: str
    since: datetime | None
    by: Literal["cron_off", "flag_off"]


def find_switched_off(
    registered: Mapping[str, datetime], schedules: Mapping[str, Cron | None]
) -> Iterator[SwitchedOffBatch]:
    """Yield batches that are switched off, by their times of registration and *schedules*."""
    for name in BATCHES:
        if schedules[name] is None:
            # The switch-off of a cron is not recorded: its last tick was still on time.
            yield SwitchedOffBatch(
                name, registered.get(name) and (JobRun.newest_tick(name) or registered[name]), "cron_off"
            )
    for name, one in BATCHES.items():
        if one.flag and not FeatureFlag.is_on(one.flag):
            ours = FeatureFlag.find_forge_relation() is None
            turned = FeatureFlag.get_or_none(FeatureFlag.name == one.flag) if ours else None
            since = registered.get(name)
            yield SwitchedOffBatch(name, since and (turned.updated_at if turned else since), "flag_off")
