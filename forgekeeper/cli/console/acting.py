"""Acts of a person: a form with a preview and a reason, then the function of the command.

The console is no worker: it sends a run of a batch to the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from anyio import to_thread
from starlette.datastructures import ImmutableMultiDict
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from forgekeeper.api.batches import BATCHES
from forgekeeper.audit import acts
from forgekeeper.cli import declared, holding, process_list, running
from forgekeeper.cli.connection import batch_named, require_redis, require_schema
from forgekeeper.cli.console.access import local, may_act, say_next
from forgekeeper.cli.console.pages import shown
from forgekeeper.cli.console.reading import AWAY, trouble
from forgekeeper.cli.quarantine import Act, Chosen
from forgekeeper.cli.terminal import WRONG_USE, Outcome, Problem, read_number, wrong_use
from forgekeeper.ledger.holds import BY_PEOPLE, Hold, Kind
from forgekeeper.platform.database import database, release
from forgekeeper.platform.settings import Settings

Fields = ImmutableMultiDict[str, str]
WITHIN, PATIENCE = timedelta(seconds=3), 4.0
"""Time that a preview may count for a form, and seconds that a form waits for its preview."""
SHOWN = 30  # sentences per form


class FormContent(NamedTuple):
    """Sentences of a preview, and *fields* of the form that limit the act to the preview."""

    said: Iterable[str]
    fields: Sequence[tuple[str, str]] = ()


class Action(NamedTuple):
    """An act: *look* previews it, the same for everybody, and *do* performs it.

    Both need a connection, and raise `Problem`. *of* are the fields that name its objects. *typed* are the fields that
    the form asks for besides the reason: `act.html` has their labels. *seen* is the field that the preview fills; the
    person can change it if it is also *typed*.
    """

    look: Callable[[Fields, Settings], FormContent]
    do: Callable[[Fields, Settings], Outcome]
    of: tuple[str, ...] = ("batch",)
    typed: tuple[str, ...] = ()
    seen: str | None = None
    migrated: bool = True


def _names(fields: Fields) -> list[str] | None:
    """Return the name of the batch, or None for all batches."""
    return None if (name := fields.get("batch", "")) == "*" else [batch_named(name).name]


def _say_work(names: list[str] | None) -> list[str]:
    found = [*process_list.at_work(names)]
    return [f"at work now: {len(found):,} runs and children", *found]


def _at_work(fields: Fields, _settings: Settings) -> FormContent:
    names = _names(fields)
    return FormContent([*_say_work(names), *holding.standing(names)])


def _hold(kind: Kind, fields: Fields) -> holding.Held:
    return holding.hold_now(kind, _names(fields), until=fields.get("until") or None, reason=fields["reason"])


def _find_holds(fields: Fields, _settings: Settings) -> FormContent:
    """Find the current holds and their ids: later pauses and stops stay."""
    names = _names(fields)
    ids = [str(hold.id) for hold in Hold.standing(*BY_PEOPLE) if names is None or hold.batch in names]
    return FormContent([*holding.standing(names), *_say_work(names)], [("hold", one) for one in ids])


def _resume(fields: Fields, _settings: Settings) -> holding.Lifted:
    seen = [read_number(one, "a pause or stop") for one in fields.getlist("hold")]
    return holding.resume_now(_names(fields), by=fields.get("by") or None, reason=fields["reason"], seen=seen)


def _preview(fields: Fields, settings: Settings) -> Iterable[str]:
    """Return a preview of the next run, which is an estimate if the time limit ends it."""
    return _find_due(fields, settings).said


def _find_due(fields: Fields, settings: Settings) -> FormContent:
    """Find the due records and their number, which limits a release even if more become due."""
    found = running.preview_of(batch_named(fields.get("batch", "")), settings, sample=0, within=WITHIN)
    expect = [] if found.due is None else [("expect", str(found.due))]
    return FormContent(map(str.strip, running.lines(found)), expect)


def _find_released(fields: Fields, settings: Settings) -> FormContent:
    """Find the due records, and the batches that are released with this batch."""
    found = _find_due(fields, settings)
    names = [batch.name for batch in holding.find_followers([fields.get("batch", "")])]
    with_it = [f"{name} is released with it, if nothing is due in it yet" for name in names]
    return FormContent([*found.said, *with_it], found.fields)


def _release(fields: Fields, _settings: Settings) -> holding.Released:
    batch = batch_named(fields.get("batch", "")).name
    expect = read_number(fields.get("expect", ""), "records", least=0)
    return holding.release_now([batch], expect=expect, reason=fields["reason"])


def _run(fields: Fields) -> int:
    return read_number(fields.get("run", ""), "a run")


def _of_run(fields: Fields, _settings: Settings) -> FormContent:
    run = running.numbered(_run(fields))
    return FormContent([f"run {run.id} of {run.batch} is {run.state} now", *process_list.at_work(run=run.id)])


def _cancel(fields: Fields, _settings: Settings) -> Outcome:
    _before, _state, done = running.cancel_now(_run(fields), reason=fields["reason"])
    return done


def _flag(fields: Fields) -> declared.Turn:
    return declared.Turn.named(fields.get("name", ""), fields.get("to", ""))


def _of_flag(fields: Fields, settings: Settings) -> FormContent:
    turn = _flag(fields)
    said = [turn.look()]
    for batch in (batch.name for batch in BATCHES.values() if batch.flag == turn.name):
        said.append(f"{batch} goes by it" + ("" if turn.on else ": no run of it does anything while it is off"))
        said += _preview(Fields({"batch": batch}), settings) if turn.on else ()
    return FormContent(said)


def _chosen(fields: Fields) -> Chosen:
    batch, kind = fields.get("batch") or None, fields.get("kind") or None
    return Chosen(fields.getlist("id"), bool(fields.get("all")), batch, kind)


def _find_chosen(act: Act, fields: Fields, settings: Settings) -> FormContent:
    chosen = _chosen(fields)
    number = chosen.total(act, settings)
    count = [] if chosen.ids else [("count", str(number))]
    return FormContent([f"so many are meant: {number:,}", *chosen.look(settings)], count)


def _decide_chosen(act: Act, fields: Fields, settings: Settings) -> Outcome:
    expect = None if fields.get("id") else read_number(fields.get("count", ""), "those that are there", least=0)
    return _chosen(fields).decide(act, settings, expect=expect)


def _of_lease(fields: Fields, _settings: Settings) -> FormContent:
    require_redis()
    holder = process_list.holder_of(fields.get("lease", ""))
    return FormContent([holder], [("holder", holder)])


LIE = ("id", "all", "batch", "kind")
ACTIONS = {
    "run": Action(
        lambda fields, settings: FormContent(_preview(fields, settings)),
        lambda fields, _: running.send_now(batch_named(fields.get("batch", ""))),
    ),
    "pause": Action(_at_work, lambda fields, _: _hold("pause", fields), typed=("until",)),
    # Stop is an emergency brake: it must work with pending migrations.
    "stop": Action(_at_work, lambda fields, _: _hold("stop", fields), typed=("until",), migrated=False),
    "resume": Action(_find_holds, _resume, typed=("by",), seen="hold"),
    "release": Action(_find_released, _release, typed=("expect",), seen="expect"),
    "cancel": Action(_of_run, _cancel, ("run",)),
    "flag": Action(_of_flag, lambda fields, _: _flag(fields).do(), ("name", "to")),
    "retry": Action(partial(_find_chosen, "retry"), partial(_decide_chosen, "retry"), LIE, seen="count"),
    # The person has to type this number.
    "discard": Action(
        lambda fields, settings: FormContent(_find_chosen("discard", fields, settings).said),
        partial(_decide_chosen, "discard"),
        LIE,
        ("count",),
    ),
    "break": Action(
        _of_lease,
        lambda fields, _: process_list.free(fields.get("lease", ""), seen=fields.get("holder", "")),
        ("lease",),
        seen="holder",
    ),
}


async def act(request: Request) -> Response:
    """Show the form of an act, or perform the act and redirect.

    Acts have threads of their own, so pages cannot use them up.
    """
    return await to_thread.run_sync(_act, request, limiter=request.app.state.acts)


def _act(request: Request) -> Response:
    action, post = ACTIONS.get(request.path_params["name"]), request.method == "POST"
    if not may_act(request):
        raise HTTPException(403, "only operators may do this, and only where the settings let them act")
    if action is None:
        raise HTTPException(404, "there is no such act")
    fields: Fields = request.state.form if post else request.query_params
    try:
        for name, text in fields.multi_items():
            if name not in {*action.of, *action.typed, action.seen, "reason", "back"}:
                wrong_use(f"this act has no field {name}")
            if len(text) > acts.LONGEST:
                wrong_use(f"{name}: write no more than {acts.LONGEST:,} characters")
        if not post:
            return _form(request, action, fields)
        said = _do(action, fields, request)
    except Problem as problem:
        return _form(request, action, fields, str(problem), 422 if problem.status == WRONG_USE else 409)
    except AWAY as error:
        return _form(request, action, fields, trouble(error), 503)
    answer = RedirectResponse(local(fields.get("back", "/")), 303)
    say_next(answer, said)
    return answer


def _do(action: Action, fields: Fields, request: Request) -> str:
    """Perform the act as this person, on a connection of this thread.

    Raises `Problem` if a part was not done.
    """
    settings: Settings = request.app.state.settings
    if not (reason := fields.get("reason", "").strip()):
        wrong_use("say why: the audit keeps the reason, for anyone who looks at it")
    with acts.begin(actor=request.state.person.name, on=settings.audit != "off", reason=reason):
        try:
            database.connect()
            if action.migrated:
                require_schema()
            done = action.do(fields, settings)
        finally:
            release()
            request.app.state.reader.acted()
    said = "; ".join([*done.said(), *(left := done.not_done())])
    if left:
        raise Problem(said)
    return said


def _form(request: Request, action: Action, fields: Fields, wrong: str = "", status: int = 200) -> Response:
    """Show the form with the typed values; its preview is shared by everybody."""

    def look() -> dict[str, Any]:
        found = action.look(fields, request.app.state.settings)
        return {"will": [*islice(found.said, SHOWN)], "seen": found.fields}

    of = [(name, text) for name, text in fields.multi_items() if name in action.of and text]
    known = request.app.state.reader.ask((request.url.path, *of), look, patience=PATIENCE)
    if known.problem is not None and (not wrong or known.problem.status == WRONG_USE):
        raise HTTPException(404, str(known.problem))
    back = local(fields.get("back") or _before(request))
    facts = {"name": request.path_params["name"], "of": of, "typed": action.typed, "seen": action.seen}
    facts |= {"fields": fields, "known": known}
    return shown(request, "act.html", "Act", status, **facts, back=back, wrong=wrong)


def _before(request: Request) -> str:
    """Return the console's page that the person came from."""
    came = urlsplit(request.headers.get("referer", ""))
    ours = came.netloc == request.headers.get("host") and not came.path.startswith("/act/")
    return came.path + (f"?{came.query}" if came.query else "") if ours else "/"
