"""What is said of refs and objects: before they go, and after; the next attempt closes what a crash has left open."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

from forgekeeper.audit.deletions import ITEMS, Audit, Ended, Intent, each_of
from forgekeeper.database import database
from forgekeeper.database.sessions import writing

Key = TypeVar("Key", bound=Hashable)

MOVED = "moved"
"""What has become of a record that was recorded again since, because it had changed."""

Look = Callable[[Sequence[Mapping[str, Any]]], Sequence[str | None]]
"""Says of the details of records what has become of each; None where that is not known now."""

# Of any age: an attempt may have died long ago, and none has looked since.
AT_WORK = """
    select unnest(ids) from audit_deletions as intended
    where phase = 'intent' and record = %(record)s
      and not exists (select from audit_deletions as closing where closing.intent = intended.id)
"""


class Item(NamedTuple):
    """A record that is about to go: what it is looked for by, and what is to be known of it."""

    id: int | None
    name: str
    detail: Mapping[str, Any]


class Intended(Generic[Key]):
    """Records of one kind that an attempt is about to delete, by whatever the caller calls them; see `Audit.intent`."""

    def __init__(self, audit: Audit, record: str, *, scope: str | None = None) -> None:
        self._audit = audit
        self._record = record
        self._scope = scope
        self._open: dict[int, dict[Key, Item]] = {}

    def begin(self, items: Mapping[Key, Item]) -> None:
        """Say what is about to go, before it does: what is said again has moved since the first time."""
        if self._audit.on and items:
            with writing():
                begun = self._begin(items)
            self._open |= begun

    @contextmanager
    def ending(self, states: Mapping[Key, str]) -> Iterator[None]:
        """Do what is done within, and say what has become of those records that were said, in one transaction."""
        with writing():
            yield
            closed, begun = self._end(states) if self._audit.on else ([], {})
        for number in closed:
            del self._open[number]
        self._open |= begun

    def open(self) -> list[Key]:
        """List the records of which it is still to be said what has become of them."""
        return list(dict.fromkeys(key for part in self._open.values() for key in part))

    def _begin(self, items: Mapping[Key, Item]) -> dict[int, dict[Key, Item]]:
        said = items.values()
        names, columns = [item.name for item in said], _columns(said)
        numbers = self._audit.intent(self._record, ids=_ids(said), names=names, scope=self._scope, **columns)
        keys = list(items)
        parts = (keys[start : start + ITEMS] for start in range(0, len(keys), ITEMS))
        return {number: {key: items[key] for key in part} for number, part in zip(numbers, parts, strict=True)}

    def _end(self, states: Mapping[Key, str]) -> tuple[list[int], dict[int, dict[Key, Item]]]:
        """Close the intents of which anything is known; what is not known of them is said in new ones."""
        closed, outcomes, left = list[int](), list[Ended](), dict[Key, Item]()
        latest = {key: number for number, part in self._open.items() for key in part}
        for number, part in self._open.items():
            said = [item for key, item in part.items() if key in states]
            if not said:
                continue
            closed.append(number)
            become = [states[key] if latest[key] == number else MOVED for key in part if key in states]
            columns = {**_columns(said), "state": _once(become)}
            outcomes.append(Ended(number, _ids(said), [item.name for item in said], columns))
            left |= {key: item for key, item in part.items() if key not in states and latest[key] == number}
        self._audit.outcomes(self._record, outcomes)
        return closed, self._begin(left) if left else {}


def at_work(record: str) -> set[int]:
    """Return the ids of the records that are said to be about to go, and not yet what became of them."""
    return {number for (number,) in database.execute_sql(AT_WORK, {"record": record}).fetchall()}


def close_earlier(audit: Audit, record: str, look: Look, *, name: str, scope: str | None = None) -> None:
    """Close what attempts before ours have left open, as *look* finds it by details; what is not known now stays open.

    *name* is the detail that records are looked for by.
    """
    while unclosed := audit.unclosed(record, scope=scope):
        rows = [list(each_of(intent.ids, intent.detail, _size(intent, name))) for intent in unclosed]
        states = iter(look([row for each in rows for row in each]))
        outcomes = []
        for intent, each in zip(unclosed, rows, strict=True):
            become = [next(states) for _ in each]
            if None not in become:
                columns = {**intent.detail, "state": _once(become)}
                outcomes.append(Ended(intent.id, intent.ids, [str(row[name]) for row in each], columns))
        if not outcomes:
            return
        with writing():
            audit.outcomes(record, outcomes)


def _columns(items: Iterable[Item]) -> dict[str, Any]:
    details = [item.detail for item in items]
    return {name: _once([detail[name] for detail in details]) for name in details[0]}


def _ids(items: Iterable[Item]) -> list[int]:
    return [item.id for item in items if item.id is not None]


def _size(intent: Intent, name: str) -> int:
    named = intent.detail[name]
    return max(len(intent.ids), len(named) if isinstance(named, list) else 1)


def _once(values: list[Any]) -> Any:
    """Return the one value where all are the same."""
    return values[0] if values and all(value == values[0] for value in values) else values
