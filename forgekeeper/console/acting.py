"""Acts of a person: a form that says what one will do and asks for a reason, and then the command's own function.

The console is no worker: to run a batch is to send it to the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from itertools import islice
from typing import NamedTuple
from urllib.parse import urlsplit

import peewee as pw
import redis
from playhouse.pool import MaxConnectionsExceeded
from starlette.datastructures import ImmutableMultiDict
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from forgekeeper.audit import acts
from forgekeeper.batches import BATCHES, FeatureFlag
from forgekeeper.cli import declared, holding, process_list, quarantine, running
from forgekeeper.cli.connection import batch_named, require_redis, require_schema, sentence
from forgekeeper.cli.terminal import WRONG_USE, Problem, moment, wrong_use
from forgekeeper.console.access import local, may_act, say_next
from forgekeeper.console.pages import shown
from forgekeeper.database import database, release
from forgekeeper.runs import holds, previewing
from forgekeeper.runs.holds import Hold, Kind
from forgekeeper.settings import Settings
from metrics.logs import clean, describe

Fields = ImmutableMultiDict[str, str]
WITHIN, PATIENCE = timedelta(seconds=3), 4.0
"""So long a preview counts for a form, and so many seconds a form waits for what an act will do."""
SHOWN = 30
"""So many sentences say what an act will do."""
REFUSED, NOTHING, NOT_DONE, WRONG, AWAY = 403, 404, 409, 422, 503


class Action(NamedTuple):
    """An act: a *look* at what it will do, which is for all who ask, and what *do* does, both in sentences.

    Both need a connection, and raise `Problem`.  *of* are the fields that name what it is done to, *typed* those that
    the form asks for besides the reason: `act.html` has their words.
    """

    look: Callable[[Fields, Settings], Iterable[str]]
    do: Callable[[Fields, Settings], Iterable[str]]
    of: tuple[str, ...] = ("batch",)
    typed: tuple[str, ...] = ()
    migrated: bool = True


def _names(fields: Fields) -> list[str] | None:
    """Return the batch that is meant; None where all are."""
    name = fields.get("batch", "")
    return None if name == "*" else [batch_named(name).name]


def _number(fields: Fields, name: str) -> int:
    text = fields.get(name, "").strip()
    if not (text.isascii() and text.isdecimal() and len(text) < 16 and int(text)):
        wrong_use(f"{name}: give a number, such as 12")
    return int(text)


def _whole(said: Iterable[str], refused: dict[str, str], word: str) -> list[str]:
    """Return what is said of what was done; raise it as a `Problem` where a part was refused."""
    if refused:
        raise Problem("; ".join([*said, *holding.complaints(refused, word)]))
    return list(said)


def _at_work(fields: Fields, _settings: Settings) -> Iterator[str]:
    found = [*process_list.at_work(names := _names(fields))]
    yield f"at work now: {len(found):,} runs and children"
    yield from found
    for name in names or sorted({hold.batch for hold in Hold.standing()}):
        yield from holds.sentences(name)


def _hold(kind: Kind, word: str) -> Callable[[Fields, Settings], list[str]]:
    def do(fields: Fields, _settings: Settings) -> list[str]:
        held = holding.hold_now(kind, _names(fields), until=fields.get("until") or None, reason=fields["reason"])
        return _whole(holding.held_back(held, word), held.refused, word)

    return do


def _preview(fields: Fields, settings: Settings) -> Iterable[str]:
    """Say what the next run would do, which is an estimate where the time is up."""
    batch = batch_named(fields.get("batch", ""))
    return map(str.strip, running.lines(previewing.preview(batch, settings, sample=0, within=WITHIN)))


def _let_go(fields: Fields, settings: Settings) -> Iterable[str]:
    return (_preview if _names(fields) else _at_work)(fields, settings)


def _resume(fields: Fields, _settings: Settings) -> list[str]:
    lifted = holding.resume_now(names := _names(fields), by=fields.get("by") or None, reason=fields["reason"])
    known = {name: ended for name, ended in lifted.ended.items() if name in lifted.left and (ended or names)}
    said = [text for name, ended in known.items() for text in holding.resumed(name, ended, lifted.left[name])]
    return _whole(said or ["that person has paused or stopped nothing"], lifted.refused, "resumed")


def _release(fields: Fields, _settings: Settings) -> Iterator[str]:
    expect = _number(fields, "expect") if fields.get("expect") else None
    done = holding.release_now(_names(fields), expect=expect, reason=fields["reason"])
    if done.uncounted or not done.released:
        raise Problem("; ".join([*holding.released(done), *holding.uncounted(done)]))
    return holding.released(done._replace(unheld=[]))


def _send(fields: Fields, _settings: Settings) -> list[str]:
    sent = running.send_now(batch_named(fields.get("batch", "")))
    if sent.run is None:
        raise Problem("; ".join(sent.obstacles))
    return [f"{fields['batch']} is queued as run {sent.run}"]


def _of_run(fields: Fields, _settings: Settings) -> Iterator[str]:
    run = running.numbered(_number(fields, "run"))
    yield f"run {run.id} of {run.batch} is {run.state} now"
    yield from process_list.at_work(run=run.id)


def _flag(fields: Fields) -> tuple[str, bool]:
    declared.flag_named(name := fields.get("name", ""))
    return (name, fields["to"] == "on") if fields.get("to") in {"on", "off"} else wrong_use("to: say on or off")


def _of_flag(fields: Fields, settings: Settings) -> Iterator[str]:
    name, on = _flag(fields)
    yield f"{name} is {'on' if FeatureFlag.is_on(name) else 'off'} now: {declared.flag_named(name)}"
    for batch in (batch.name for batch in BATCHES.values() if batch.flag == name):
        yield f"{batch} goes by it" + ("" if on else ": no run of it does anything while it is off")
        yield from _preview(Fields({"batch": batch}), settings) if on else ()


def _turn(fields: Fields, _settings: Settings) -> list[str]:
    name, on = _flag(fields)
    declared.turn(name, on=on)
    return [f"{name} is {'on' if on else 'off'}"]


def _filter(fields: Fields) -> tuple[str | None, str | None]:
    if not (fields.get("id") or fields.get("all")):
        wrong_use("name one by its id, or say that all are meant")
    return fields.get("batch") or None, fields.get("kind") or None


def _lies(fields: Fields, settings: Settings) -> Iterator[str]:
    which = _filter(fields)
    for one in (quarantine.named(number, settings) for number in fields.getlist("id")):
        yield f"{one.id}: {one.record} {one.key} of {one.batch} failed {one.failures} times: {one.error}"
    if not fields.get("id"):
        yield f"so many lie in quarantine now: {quarantine.count_all(settings, *which)}"


def _decide(act: quarantine.Act, word: str) -> Callable[[Fields, Settings], list[str]]:
    def do(fields: Fields, settings: Settings) -> list[str]:
        which, ids, done = _filter(fields), [*fields.getlist("id")], 0
        there = 0 if ids else quarantine.count_all(settings, *which)
        if act == "discard" and not ids and (repeated := _number(fields, "count")) != there:
            raise Problem(f"nothing is discarded: {there:,} lie there now, and you have repeated {repeated:,}")
        refused: list[str] = []
        for one in ids or (None,):
            try:
                done += quarantine.decide(act, one, *which, settings)
            except Problem as problem:
                refused.append(str(problem))
        if refused:
            raise Problem("; ".join([f"{done} {word}", *refused]))
        return [f"{done:,} {word}"]

    return do


def _of_lease(fields: Fields, _settings: Settings) -> list[str]:
    require_redis()
    found = [one for one in process_list.held() if one["name"] == fields.get("lease")]
    return [f"{one['holder']} holds it since {moment(one['since'])} UTC" for one in found] or ["nobody holds it now"]


def _break(fields: Fields, _settings: Settings) -> list[str]:
    process_list.free(lease := fields.get("lease", ""))
    return [f"{lease} is free"]


def _cancel(fields: Fields, _settings: Settings) -> list[str]:
    return [running.cancel_now(_number(fields, "run"), reason=fields["reason"]).sentence]


LIE = ("id", "all", "batch", "kind")
ACTIONS = {
    "run": Action(_preview, _send),
    "pause": Action(_at_work, _hold("pause", "paused"), typed=("until",)),
    # An emergency brake does not ask for more than it needs.
    "stop": Action(_at_work, _hold("stop", "stopped"), typed=("until",), migrated=False),
    "resume": Action(_let_go, _resume, typed=("by",)),
    "release": Action(_let_go, _release, typed=("expect",)),
    "cancel": Action(_of_run, _cancel, ("run",)),
    "flag": Action(_of_flag, _turn, ("name", "to")),
    "retry": Action(_lies, _decide("retry", "will be tried again"), LIE),
    "discard": Action(_lies, _decide("discard", "discarded"), LIE, ("count",)),
    "break": Action(_of_lease, _break, ("lease",)),
}


def act(request: Request) -> Response:
    """Show the form of an act, or do it and go back; Starlette calls it in a thread."""
    action, wrong, status = ACTIONS.get(request.path_params["name"]), "", 200
    if not may_act(request):
        return _refused(request, REFUSED, "only operators may do this, and only where the settings let them act")
    if action is None:
        return _refused(request, NOTHING, "there is no such act")
    fields: Fields = request.state.form if request.method == "POST" else request.query_params
    try:
        _check(action, fields)
        if request.method == "POST":
            return _done(request, _do(action, fields, request.app.state.settings, request.state.person.name))
    except Problem as problem:
        wrong, status = str(problem), WRONG if problem.status == WRONG_USE else NOT_DONE
    except (pw.PeeweeException, redis.RedisError, MaxConnectionsExceeded, OSError) as error:
        wrong, status = clean(sentence(error) or describe(error)), AWAY
    return _form(request, action, fields, wrong, status)


def _check(action: Action, fields: Fields) -> None:
    """Refuse fields that the act does not have, and texts that are too long."""
    if unknown := sorted({*fields} - {*action.of, *action.typed, "reason", "back"}):
        wrong_use(f"this act has no field {unknown[0]}")
    for name, text in fields.multi_items():
        if len(text) > acts.LONGEST:
            wrong_use(f"{name}: write no more than {acts.LONGEST:,} characters")


def _do(action: Action, fields: Fields, settings: Settings, person: str) -> str:
    """Do it as that person, on a connection of this thread."""
    if not (reason := fields.get("reason", "").strip()):
        wrong_use("say why: the audit keeps the reason, for anyone who looks at it")
    with acts.begin(actor=person, on=settings.audit != "off", reason=reason):
        try:
            database.connect()
            if action.migrated:
                require_schema()
            return "; ".join(action.do(fields, settings))
        finally:
            release()


def _done(request: Request, said: str) -> Response:
    answer = RedirectResponse(local(request.state.form.get("back", "/")), 303)
    say_next(answer, said)
    return answer


def _form(request: Request, action: Action, fields: Fields, wrong: str, status: int) -> Response:
    """Show the form, with what was typed; what the act will do is asked once for all who look at it."""
    of = [(name, text) for name, text in fields.multi_items() if name in action.of and text]
    look = lambda: {"will": [*islice(action.look(fields, request.app.state.settings), SHOWN)]}  # noqa: E731
    known = request.app.state.reader.ask((request.url.path, *of), look, patience=PATIENCE)
    if known.problem is not None and known.problem.status == WRONG_USE:
        return _refused(request, NOTHING, str(known.problem))
    facts = {
        "name": request.path_params["name"],
        "of": of,
        "typed": {name: fields.get(name) for name in action.typed},
        "reason": fields.get("reason", ""),
        "back": local(fields.get("back") or _before(request)),
        "wrong": wrong,
        "will": known.value and known.value["will"],
        "unknown": known.problem or known.trouble,
    }
    return shown(request, "act.html", "Act", status, **facts)


def _before(request: Request) -> str:
    """Return the page of ours that the person comes from."""
    came = urlsplit(request.headers.get("referer", ""))
    ours = came.netloc == request.headers.get("host") and not came.path.startswith("/act/")
    return came.path + (f"?{came.query}" if came.query else "") if ours else "/"


def _refused(request: Request, status: int, said: str) -> Response:
    return shown(request, "problem.html", "Nothing here" if status == NOTHING else "Refused", status, sentence=said)
