"""Acts of a person: a form with a preview and a reason, then the function of the command.

The console is no worker: it sends a run of a batch to the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from anyio import to_thread
from starlette.datastructures import ImmutableMultiDict
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from forgekeeper.api.batches import BATCHES
from forgekeeper.audit import acts
from forgekeeper.cli import declared, holding, process_list, running
from forgekeeper.cli.connection import batch_named, require_redis, require_schema
from forgekeeper.cli.console.access import can_act, ensure_local_path, find_previous_page, set_flash_message
from forgekeeper.cli.console.pages import render_page
from forgekeeper.cli.console.reading import SERVER_ERRORS, describe_trouble
from forgekeeper.cli.console.texts import TranslatableText
from forgekeeper.cli.quarantine import EntryChoice, QuarantineAct
from forgekeeper.cli.terminal import WRONG_USE_STATUS, ActResult, Problem, read_number, wrong_use
from forgekeeper.ledger.holds import KINDS_BY_PEOPLE, Hold, Kind
from forgekeeper.platform.database import database, release_connection
from forgekeeper.platform.settings import Settings

FormFields = ImmutableMultiDict[str, str]
FORM_PREVIEW_TIME_LIMIT, FORM_TIMEOUT_SECONDS = timedelta(seconds=3), 4.0
"""Time that a preview may count for a form, and seconds that a form waits for its preview."""
MAX_FORM_SENTENCES = 30  # sentences per form


class FormContent(NamedTuple):
    """Sentences of a preview, and *fields* of the form that limit the act to the preview."""

    sentences: Iterable[str]
    fields: Sequence[tuple[str, str]] = ()


class Action(NamedTuple):
    """An act: *preview* previews it, the same for everybody, and *perform* performs it.

    Both need a connection, and raise `Problem`. *object_fields* are the fields that name its objects. *input_fields*
    are the fields that the form asks for besides the reason: `act.html` has their labels. *preview_field* is the field
    that the preview fills; the person can change it if it is also among *input_fields*.
    """

    preview: Callable[[FormFields, Settings], FormContent]
    perform: Callable[[FormFields, Settings], ActResult]
    object_fields: tuple[str, ...] = ("batch",)
    input_fields: tuple[str, ...] = ()
    preview_field: str | None = None
    needs_migrations: bool = True


def _read_batch_names(fields: FormFields) -> list[str] | None:
    """Return the name of the batch, or None for all batches."""
    return None if (name := fields.get("batch", "")) == "*" else [batch_named(name).name]


def _describe_work(names: list[str] | None) -> list[str]:
    found = [*process_list.describe_work(names)]
    return [TranslatableText("running now: %(count)s runs and children", count=f"{len(found):,}"), *found]


def _preview_hold(fields: FormFields, _settings: Settings) -> FormContent:
    names = _read_batch_names(fields)
    return FormContent([*_describe_work(names), *holding.describe_holds(names)])


def _hold_batches(kind: Kind, fields: FormFields) -> holding.HoldResult:
    return holding.hold_batches(
        kind, _read_batch_names(fields), until=fields.get("until") or None, reason=fields["reason"]
    )


def _preview_resume(fields: FormFields, _settings: Settings) -> FormContent:
    """Find the current holds and their ids: later pauses and stops stay."""
    names = _read_batch_names(fields)
    ids = [str(hold.id) for hold in Hold.list_active(*KINDS_BY_PEOPLE) if names is None or hold.batch in names]
    return FormContent([*holding.describe_holds(names), *_describe_work(names)], [("hold", one) for one in ids])


def _resume_batches(fields: FormFields, _settings: Settings) -> holding.ResumeResult:
    seen = [read_number(one, "a pause or stop") for one in fields.getlist("hold")]
    return holding.resume_batches(
        _read_batch_names(fields), by=fields.get("by") or None, reason=fields["reason"], seen=seen
    )


def _preview_run(fields: FormFields, settings: Settings) -> Iterable[str]:
    """Return a preview of the next run, which is an estimate if the time limit ends it."""
    return _preview_due(fields, settings).sentences


def _preview_due(fields: FormFields, settings: Settings) -> FormContent:
    """Find the due records and their number, which limits a release even if more become due."""
    found = running.require_preview(
        batch_named(fields.get("batch", "")), settings, sample=0, within=FORM_PREVIEW_TIME_LIMIT
    )
    expect = [] if found.due is None else [("expect", str(found.due))]
    return FormContent(map(str.strip, running.list_preview_lines(found)), expect)


def _preview_release(fields: FormFields, settings: Settings) -> FormContent:
    """Find the due records, and the batches that are released with this batch."""
    found = _preview_due(fields, settings)
    names = [batch.name for batch in holding.find_followers([fields.get("batch", "")])]
    with_it = [
        TranslatableText("%(batch)s is released, too, if it has no due records yet", batch=name) for name in names
    ]
    return FormContent([*found.sentences, *with_it], found.fields)


def _release_batch(fields: FormFields, _settings: Settings) -> holding.ReleaseResult:
    batch = batch_named(fields.get("batch", "")).name
    expect = read_number(fields.get("expect", ""), "records", least=0)
    return holding.release_batches([batch], expect=expect, reason=fields["reason"])


def _read_run_number(fields: FormFields) -> int:
    return read_number(fields.get("run", ""), "a run")


def _preview_cancel(fields: FormFields, _settings: Settings) -> FormContent:
    run = running.require_run(_read_run_number(fields))
    sentence = TranslatableText(
        "run %(run)s of %(batch)s is %(state)s now", run=run.id, batch=run.batch, state=run.state
    )
    return FormContent([sentence, *process_list.describe_work(run=run.id)])


def _cancel_run(fields: FormFields, _settings: Settings) -> ActResult:
    _before, _state, done = running.cancel_run(_read_run_number(fields), reason=fields["reason"])
    return done


def _read_flag_change(fields: FormFields) -> declared.FlagChange:
    return declared.FlagChange.parse(fields.get("name", ""), fields.get("to", ""))


def _preview_flag_change(fields: FormFields, settings: Settings) -> FormContent:
    turn = _read_flag_change(fields)
    said = [turn.describe_state()]
    for batch in (batch.name for batch in BATCHES.values() if batch.flag == turn.name):
        said.append(
            TranslatableText("%(batch)s depends on it", batch=batch)
            if turn.on
            else TranslatableText("%(batch)s depends on it: its runs do nothing while the flag is off", batch=batch)
        )
        said += _preview_run(FormFields({"batch": batch}), settings) if turn.on else ()
    return FormContent(said)


def _read_selection(fields: FormFields) -> EntryChoice:
    batch, kind = fields.get("batch") or None, fields.get("kind") or None
    return EntryChoice(fields.getlist("id"), bool(fields.get("all")), batch, kind)


def _preview_decision(act: QuarantineAct, fields: FormFields, settings: Settings) -> FormContent:
    chosen = _read_selection(fields)
    number = chosen.count_entries(act, settings)
    count = [] if chosen.ids else [("count", str(number))]
    found = TranslatableText("number of entries: %(count)s", count=f"{number:,}")
    return FormContent([found, *chosen.describe_entries(settings)], count)


def _decide_selection(act: QuarantineAct, fields: FormFields, settings: Settings) -> ActResult:
    expect = None if fields.get("id") else read_number(fields.get("count", ""), "entries", least=0)
    return _read_selection(fields).decide(act, settings, expect=expect)


def _preview_lease_break(fields: FormFields, _settings: Settings) -> FormContent:
    require_redis()
    holder = process_list.describe_holder(fields.get("lease", ""))
    return FormContent([holder], [("holder", holder)])


SELECTION_FIELDS = ("id", "all", "batch", "kind")
CONSOLE_ACTIONS = {
    "run": Action(
        lambda fields, settings: FormContent(_preview_run(fields, settings)),
        lambda fields, _: running.send_batch(batch_named(fields.get("batch", ""))),
    ),
    "pause": Action(_preview_hold, lambda fields, _: _hold_batches("pause", fields), input_fields=("until",)),
    # A stop must work in an emergency, even with pending migrations.
    "stop": Action(
        _preview_hold, lambda fields, _: _hold_batches("stop", fields), input_fields=("until",), needs_migrations=False
    ),
    "resume": Action(_preview_resume, _resume_batches, input_fields=("by",), preview_field="hold"),
    "release": Action(_preview_release, _release_batch, input_fields=("expect",), preview_field="expect"),
    "cancel": Action(_preview_cancel, _cancel_run, ("run",)),
    "flag": Action(_preview_flag_change, lambda fields, _: _read_flag_change(fields).apply(), ("name", "to")),
    "retry": Action(
        partial(_preview_decision, "retry"),
        partial(_decide_selection, "retry"),
        SELECTION_FIELDS,
        preview_field="count",
    ),
    # The person has to type this number.
    "discard": Action(
        lambda fields, settings: FormContent(_preview_decision("discard", fields, settings).sentences),
        partial(_decide_selection, "discard"),
        SELECTION_FIELDS,
        ("count",),
    ),
    "break": Action(
        _preview_lease_break,
        lambda fields, _: process_list.free_lease(fields.get("lease", ""), seen=fields.get("holder", "")),
        ("lease",),
        preview_field="holder",
    ),
}


async def handle_action(request: Request) -> Response:
    """Show the form of an act, or perform the act and redirect.

    Acts have threads of their own, so pages cannot use them up.
    """
    return await to_thread.run_sync(_answer_action, request, limiter=request.app.state.acts)


def _answer_action(request: Request) -> Response:
    action, post = CONSOLE_ACTIONS.get(request.path_params["name"]), request.method == "POST"
    if not can_act(request):
        sentence = TranslatableText("only operators may do this, and only if FORGEKEEPER_CONSOLE_ACTIONS is on")
        raise HTTPException(403, sentence)
    if action is None:
        raise HTTPException(404, TranslatableText("there is no such act"))
    fields: FormFields = request.state.form if post else request.query_params
    try:
        for name, text in fields.multi_items():
            if name not in {*action.object_fields, *action.input_fields, action.preview_field, "reason", "back"}:
                wrong_use(TranslatableText("this act has no field %(name)s", name=name))
            if len(text) > acts.MAX_TEXT_LENGTH:
                limit = f"{acts.MAX_TEXT_LENGTH:,}"
                wrong_use(TranslatableText("%(name)s: write no more than %(limit)s characters", name=name, limit=limit))
        if not post:
            return _render_form(request, action, fields)
        said = _perform_action(action, fields, request)
    except Problem as problem:
        return _render_form(
            request, action, fields, problem.sentence, 422 if problem.status == WRONG_USE_STATUS else 409
        )
    except SERVER_ERRORS as error:
        return _render_form(request, action, fields, describe_trouble(error), 503)
    answer = RedirectResponse(ensure_local_path(fields.get("back", "/")), 303)
    set_flash_message(answer, said)
    return answer


def _perform_action(action: Action, fields: FormFields, request: Request) -> str:
    """Perform the act as this person, on a connection of this thread.

    Raises `Problem` if a part was not done.
    """
    settings: Settings = request.app.state.settings
    if not (reason := fields.get("reason", "").strip()):
        wrong_use(TranslatableText("give a reason: the audit keeps it"))
    with acts.recording_acts(actor=request.state.person.name, on=settings.audit != "off", reason=reason):
        try:
            database.connect()
            if action.needs_migrations:
                require_schema()
            done = action.perform(fields, settings)
        finally:
            release_connection()
            request.app.state.reader.discard_answers()
    said = "; ".join([*done.describe_changes(), *(left := done.describe_refusals())])
    if left:
        raise Problem(said)
    return said


def _render_form(request: Request, action: Action, fields: FormFields, wrong: str = "", status: int = 200) -> Response:
    """Show the form with the typed values; its preview is shared by everybody."""

    def read_preview() -> dict[str, Any]:
        found = action.preview(fields, request.app.state.settings)
        return {"will": [*islice(found.sentences, MAX_FORM_SENTENCES)], "seen": found.fields}

    object_fields = [(name, text) for name, text in fields.multi_items() if name in action.object_fields and text]
    known = request.app.state.reader.ask(
        (request.url.path, *object_fields), read_preview, timeout_seconds=FORM_TIMEOUT_SECONDS
    )
    if known.problem is not None and (not wrong or known.problem.status == WRONG_USE_STATUS):
        raise HTTPException(404, known.problem.sentence)
    previous = find_previous_page(request)
    back = ensure_local_path(fields.get("back") or ("/" if previous.startswith("/act/") else previous))
    facts = {
        "name": request.path_params["name"],
        "object_fields": object_fields,
        "typed": action.input_fields,
        "seen": action.preview_field,
    }
    facts |= {"fields": fields, "known": known}
    return render_page(request, "act.html", TranslatableText("Act"), status, **facts, back=back, wrong=wrong)
