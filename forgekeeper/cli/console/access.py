"""Authentication and roles of the console, and requests that are refused before any page.

A person is known by a session, after a login with the password of a user in the file; or by the header of a proxy that
the settings name. Without users and proxies, everybody on this machine is a viewer. A program is known by a token, with
which it may read the API and nothing else.
"""

from __future__ import annotations

import re
import secrets
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from hashlib import sha256
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, urlsplit

import structlog
from anyio import CapacityLimiter, to_thread
from itsdangerous import BadData, URLSafeTimedSerializer
from starlette.datastructures import ImmutableMultiDict
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from forgekeeper.cli.console.languages import LANGUAGE_COOKIE, LANGUAGE_COOKIE_SECONDS, LANGUAGES
from forgekeeper.cli.console.named_lines import MAX_NAME_LENGTH, LineFile, is_valid_name
from forgekeeper.cli.console.pages import FLASH_COOKIE, render_page, render_refusal
from forgekeeper.cli.console.probes import answer_probe
from forgekeeper.cli.console.problem_details import is_for_api
from forgekeeper.cli.console.texts import TranslatableText
from forgekeeper.cli.console.tokens import TOKEN_FORMAT, TOKEN_PREFIX, ApiToken, find_token, read_clock
from forgekeeper.cli.console.users import LOCAL_HOST_NAMES, USER_FORMAT, Role, User, is_correct_password
from forgekeeper.cli.terminal import Problem
from forgekeeper.platform.settings import Settings

RESPONSE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Headers of every response."""
SESSION_COOKIE = "forgekeeper_session"
"""Cookie of a login session."""
KNOWN_BROWSER_COOKIE = "forgekeeper_known"
"""Cookie of a browser with an earlier login, which strangers' failures cannot lock out."""
SESSION_SECONDS, KNOWN_BROWSER_SECONDS = 12 * 3600, 30 * 86_400
LANGUAGE_ADDRESS = "/language/"
"""Address of the button that switches to a language, before the language."""
MAX_FORM_BYTES = 64 * 1024
"""Maximum size of a form, in bytes."""
MAX_FORM_FIELDS = 2_000
MAX_FAILED_LOGINS, FAILED_LOGINS_WINDOW_SECONDS = 5, 60.0
"""Maximum failed logins per minute, for an address and for a name."""
READING_METHODS = ("GET", "HEAD")
TOKEN_LOG_INTERVAL_SECONDS = 3600.0
"""Seconds after which the use of a token is logged again."""
AUTHENTICATION_REMEDY = "`forgekeeper console token add NAME` makes a token; `Authorization: Bearer TOKEN` sends it"

log = structlog.get_logger(__name__)
# The key exists in this process only: a restart ends all sessions.
_cookie_signer = URLSafeTimedSerializer(secrets.token_hex(32))


class Person(NamedTuple):
    """Person who sent a request; an *operator* may act.

    With *has_session* the person has signed in, and can sign out.
    """

    name: str
    role: Role
    has_session: bool = False


def can_act(request: Request) -> bool:
    """Check whether the person is an operator and the settings allow actions."""
    person: Person | None = request.state.person
    return person is not None and person.role == "operator"


def set_flash_message(response: Response, sentence: str) -> None:
    """Show *sentence* once at the top of the next page in this browser.

    For the redirect after a POST: `base.html` shows the sentence as `flash_message`, escaped, also to persons
    without a session.
    """
    response.set_cookie(
        FLASH_COOKIE,
        _cookie_signer.dumps(sentence[:1000], salt=FLASH_COOKIE),
        max_age=60,
        httponly=True,
        samesite="lax",
    )


def ensure_local_path(path: str) -> str:
    """Return *path*, or the first page if *path* could lead to another host."""
    fine = path.startswith("/") and not path.startswith("//") and "\\" not in path and path.isprintable()
    return path if fine and " " not in path else "/"


def find_previous_page(request: Request) -> str:
    """Return the console's page that the person came from, else the first page."""
    came = urlsplit(request.headers.get("referer", ""))
    if came.netloc != request.headers.get("host"):
        return "/"
    return ensure_local_path(came.path + (f"?{came.query}" if came.query else ""))


class EndedSessions:
    """Sessions that people have ended, each remembered until its cookie expires."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._expires_at: dict[str, float] = {}

    def add(self, session: str) -> None:
        """Remember that the session was ended."""
        now = self._clock()
        self._expires_at = {ended: until for ended, until in self._expires_at.items() if until > now}
        self._expires_at[session] = now + self._seconds

    def __contains__(self, session: str) -> bool:
        """Check whether the session was ended."""
        return session in self._expires_at


class AccessMiddleware:
    """Middleware that authenticates requests.

    It sets `person`, `flash_message` and, for a POST, `form` in the request's state.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._settings = app, settings
        self._users = LineFile(settings.console_users, USER_FORMAT) if settings.console_users else None
        self._tokens = LineFile(settings.console_tokens, TOKEN_FORMAT) if settings.console_tokens else None
        self._token_log_times: dict[str, float] = {}
        self._ended = EndedSessions(SESSION_SECONDS)
        self._failures: Counter[str] = Counter()
        self._failures_reset_at = 0.0
        self._hashing_limiter = CapacityLimiter(2)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request, or pass it on."""
        request = Request(scope, receive)
        if (probed := answer_probe(request)) is not None:
            await probed(scope, receive, send)
            return
        request.state.person, request.state.flash_message = None, None
        if request.method == "GET" and "hx-request" not in request.headers:
            request.state.flash_message = _read_signed_cookie(request, FLASH_COOKIE, 60)
        try:
            answer = await self._intercept_request(request)
        except HTTPException as refused:
            answer = render_refusal(request, TranslatableText("Refused"), refused.status_code, refused.detail)
            answer.headers.update(refused.headers or {})
        except Problem as problem:
            log.warning("user file unreadable", error=str(problem))
            sentence = TranslatableText("the console cannot read the file of its users; see its log")
            answer = render_refusal(request, TranslatableText("Refused"), 503, sentence)
        await (answer or self._app)(scope, receive, send)

    async def _intercept_request(self, request: Request) -> Response | None:
        """Return the answer to a request that is not passed on, or None.

        Raises `HTTPException` to refuse the request.
        """
        path: str = request.scope["path"]  # not `request.url.path`, which depends on the header Host
        self._refuse_other_hosts(request)
        if is_for_api(request):
            request.state.person = self._identify_reader(request)
            return None
        if request.method not in READING_METHODS:
            _refuse_cross_site(request)
            request.state.form = await _read_form(request)
        if path.startswith("/static/"):
            return None
        if request.method == "POST" and path.startswith(LANGUAGE_ADDRESS):
            return _switch_language(request, path.removeprefix(LANGUAGE_ADDRESS))
        request.state.person = self._identify_person(request)
        if self._users and path == "/login":
            return await self._answer_login(request)
        if request.state.person is None:
            return _redirect_to_login(request)
        return self._log_out(request) if (request.method, path) == ("POST", "/logout") else None

    def _refuse_other_hosts(self, request: Request) -> None:
        """Refuse other host names (DNS rebinding) if no password or proxy protects the console."""
        name = re.sub(r":\d+\Z", "", request.headers.get("host", "").lower()).strip("[]")
        if not (
            self._users or self._settings.console_proxy or name in {*LOCAL_HOST_NAMES, self._settings.console_host}
        ):
            raise HTTPException(421, TranslatableText("open this console as localhost: other host names are refused"))

    def _identify_reader(self, request: Request) -> Person:
        """Return the person or the token that reads the API, always as a viewer.

        A proxy may send a bearer token of its own, which counts only if it looks like ours.
        """
        if request.method not in READING_METHODS:
            raise HTTPException(405, "the API only reads: send GET", {"Allow": ", ".join(READING_METHODS)})
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and (bearer.startswith(TOKEN_PREFIX) or not self._settings.console_proxy):
            return Person(self._require_token(request, bearer.strip()).name, "viewer")
        if (person := self._identify_person(request)) is None:
            raise HTTPException(401, f"the API needs a token: {AUTHENTICATION_REMEDY}", {"WWW-Authenticate": "Bearer"})
        return Person(person.name, "viewer")

    def _require_token(self, request: Request, bearer: str) -> ApiToken:
        """Return the valid token; raise `HTTPException` and count a failed login otherwise.

        Failures of others at the same address do not refuse a valid token: nobody can guess one.
        """
        if self._settings.console_proxy:
            self._refuse_direct_request(request)
        try:
            known = self._tokens.read_lines() if self._tokens else {}
        except Problem as problem:
            log.warning("token file unreadable", error=str(problem))
            raise HTTPException(503, "the console cannot read the file of its tokens; see its log") from None
        client = self._client_address(request)
        token = find_token(known.values(), bearer)
        if token is not None and not token.is_expired(read_clock()):
            self._log_token_use(token, client)
            return token
        word = "unknown" if token is None else "expired"
        who = {"name": token and token.name, "client": str(client)}
        keys = {_address_key(client)}
        self._refuse_after_failures(keys, "console token refused", who)
        self._failures.update(keys)
        log.warning("console token refused", **who, reason=word)
        challenge = {"WWW-Authenticate": 'Bearer error="invalid_token"'}
        raise HTTPException(401, f"the token is {word}: {AUTHENTICATION_REMEDY}", challenge)

    def _log_token_use(self, token: ApiToken, client: IPv4Address | IPv6Address) -> None:
        """Log the use of a token, at most once in `TOKEN_LOG_INTERVAL_SECONDS`."""
        if self._token_log_times.get(token.hash, -TOKEN_LOG_INTERVAL_SECONDS) + TOKEN_LOG_INTERVAL_SECONDS <= (
            now := time.monotonic()
        ):
            self._token_log_times[token.hash] = now
            log.info("console token used", name=token.name, client=str(client))

    def _identify_person(self, request: Request) -> Person | None:
        """Return the person, or None if a login is needed."""
        users = self._users.read_lines() if self._users else {}
        name = self._read_proxy_user(request) if self._settings.console_proxy else None
        if name is not None:
            return self._grant_role(name, users[name].role if name in users else "viewer")
        if not self._users:
            return self._grant_role("anybody", "viewer")
        session = _read_signed_cookie(request, SESSION_COOKIE, SESSION_SECONDS)
        if not isinstance(session, dict) or session["once"] in self._ended:
            return None
        user = users.get(session["name"])
        return (
            self._grant_role(user.name, user.role, session=True)
            if user and session["of"] == _password_fingerprint(user)
            else None
        )

    def _grant_role(self, name: str, role: Role, *, session: bool = False) -> Person:
        return Person(name, role if self._settings.console_actions == "on" else "viewer", session)

    def _read_proxy_user(self, request: Request) -> str | None:
        """Return the user whom the proxy names; None if it names nobody and people can log in."""
        self._refuse_direct_request(request)
        names = request.headers.getlist(self._settings.console_proxy_header)
        if not names and self._users:
            return None
        if len(names) != 1 or not names[0].strip():
            raise HTTPException(403, TranslatableText("the proxy must send exactly one user name"))
        with suppress(UnicodeDecodeError):
            # The name stays unchanged: a trimmed or cleaned name could be another person's.
            if is_valid_name(name := names[0].encode("latin-1").decode()):
                return name
        raise HTTPException(403, TranslatableText("the proxy sends a name that is not valid for a user"))

    def _refuse_direct_request(self, request: Request) -> None:
        """Refuse a request that does not come from a known proxy."""
        if not any(_peer_address(request) in network for network in self._settings.console_proxy):
            raise HTTPException(403, TranslatableText("use the address of the proxy: direct requests are refused"))

    async def _answer_login(self, request: Request) -> Response:
        asked = request.state.form if request.method == "POST" else request.query_params
        to, wrong = ensure_local_path(asked.get("next", "/")), request.method == "POST"
        if wrong and (user := await self._authenticate_user(request, asked.get("name", ""), asked.get("password", ""))):
            return _begin_session(RedirectResponse(to, 303), user, request)
        return render_page(
            request, "login.html", TranslatableText("Log in"), 401 if wrong else 200, next=to, wrong=wrong
        )

    async def _authenticate_user(self, request: Request, name: str, password: str) -> User | None:
        """Return the user if name and password match.

        Raises `HTTPException` after too many failures.
        """
        user = self._users.read_lines().get(name) if self._users else None
        client = self._client_address(request)
        keys = {_address_key(client), f"for {name[:MAX_NAME_LENGTH]}"}
        known_browser = _read_signed_cookie(request, KNOWN_BROWSER_COOKIE, KNOWN_BROWSER_SECONDS)
        if isinstance(known_browser, dict) and known_browser["name"] == name:
            # Failures of strangers do not lock out a browser in which this person has logged in before.
            keys = {f"by {known_browser['once']}"}
        who = {"user": user and user.name, "client": str(client)}
        self._refuse_after_failures(keys, "console login refused", who)
        # Failures are counted before the check, so that parallel requests get no additional guesses.
        (failures := self._failures).update(keys)
        if not await to_thread.run_sync(partial(is_correct_password, user, password), limiter=self._hashing_limiter):
            log.warning("console login failed", **who)
            return None
        failures.subtract(keys)
        log.info("console login", **who)
        return user

    def _refuse_after_failures(self, keys: set[str], event: str, who: dict[str, str | None]) -> None:
        """Refuse a login or a wrong token if too many have failed for one of the *keys*."""
        if time.monotonic() > self._failures_reset_at:
            self._failures, self._failures_reset_at = Counter(), time.monotonic() + FAILED_LOGINS_WINDOW_SECONDS
        if max(self._failures[key] for key in keys) >= MAX_FAILED_LOGINS:
            log.warning(event, **who, reason="too many")
            seconds = str(int(self._failures_reset_at - time.monotonic()) + 1)
            sentence = TranslatableText(
                "too many logins have failed: try again in %(seconds)s seconds", seconds=seconds
            )
            raise HTTPException(429, sentence, {"Retry-After": seconds})

    def _client_address(self, request: Request) -> IPv4Address | IPv6Address:
        """Return the client's address: behind known proxies, the last foreign X-Forwarded-For."""
        client, proxies = _peer_address(request), self._settings.console_proxy
        forwarded_for = ",".join(request.headers.getlist("x-forwarded-for")).split(",")
        with suppress(ValueError):
            while forwarded_for and any(client in network for network in proxies):
                client = ip_address(forwarded_for.pop().strip())
        return client

    def _log_out(self, request: Request) -> Response:
        session = _read_signed_cookie(request, SESSION_COOKIE, SESSION_SECONDS)
        if isinstance(session, dict):
            self._ended.add(session["once"])
        answer = RedirectResponse("/login", 303)
        answer.delete_cookie(SESSION_COOKIE, httponly=True, samesite="lax")
        return answer


def _refuse_cross_site(request: Request) -> None:
    """Refuse requests that a page of another site makes a browser send (CSRF)."""
    headers = request.headers
    if (site := headers.get("sec-fetch-site")) is not None:
        fine = site in {"same-origin", "none"}
    else:
        fine = False
        with suppress(ValueError):
            fine = bool(origin := headers.get("origin")) and urlsplit(origin).netloc == headers.get("host")
    if not fine:
        sentence = TranslatableText(
            "this form was not sent from a page of the console: open the page and send it again"
        )
        raise HTTPException(403, sentence)


async def _read_form(request: Request) -> ImmutableMultiDict[str, str]:
    """Read the fields of a form; its Content-Length is required and limited."""
    length = request.headers.get("content-length", str(MAX_FORM_BYTES + 1))
    if "transfer-encoding" in request.headers or int(length) > MAX_FORM_BYTES:
        limit = f"{MAX_FORM_BYTES:,}"
        sentence = TranslatableText("the form is larger than %(limit)s bytes: select less at once", limit=limit)
        raise HTTPException(413, sentence)
    try:
        body = (await request.body()).decode(errors="replace")
        return ImmutableMultiDict(parse_qsl(body, keep_blank_values=True, max_num_fields=MAX_FORM_FIELDS))
    except (ValueError, ClientDisconnect):
        limit = f"{MAX_FORM_FIELDS:,}"
        sentence = TranslatableText("the form has more than %(limit)s fields: select less", limit=limit)
        raise HTTPException(400, sentence) from None


def _switch_language(request: Request, language: str) -> Response:
    """Keep the language in the browser, also before a login; return to the page with the button."""
    answer = RedirectResponse(find_previous_page(request), 303)
    if language in LANGUAGES:
        answer.set_cookie(
            LANGUAGE_COOKIE,
            language,
            max_age=LANGUAGE_COOKIE_SECONDS,
            httponly=True,
            samesite="lax",
            secure=_is_encrypted(request),
        )
    return answer


def _is_encrypted(request: Request) -> bool:
    # If a proxy terminates TLS, only the browser's Origin shows it.
    return request.scope["scheme"] == "https" or request.headers.get("origin", "").startswith("https:")


def _redirect_to_login(request: Request) -> Response:
    asked = request.scope["path"] + (f"?{request.query_params}" if request.query_params else "")
    to = f"/login?next={quote(ensure_local_path(asked) if request.method == 'GET' else '/', safe='')}"
    # htmx would insert a redirect's page into the current page, so the header makes the browser leave it.
    if "hx-request" in request.headers:
        return Response(status_code=401, headers={"HX-Redirect": to})
    return RedirectResponse(to, 303)


def _begin_session(answer: Response, user: User, request: Request) -> Response:
    """Begin a new session with this answer."""
    value = _cookie_signer.dumps(
        {"name": user.name, "of": _password_fingerprint(user), "once": secrets.token_hex(16)}, salt=SESSION_COOKIE
    )
    secure = _is_encrypted(request)
    known = _cookie_signer.dumps({"name": user.name, "once": secrets.token_hex(16)}, salt=KNOWN_BROWSER_COOKIE)
    for cookie, content, seconds in (
        (SESSION_COOKIE, value, SESSION_SECONDS),
        (KNOWN_BROWSER_COOKIE, known, KNOWN_BROWSER_SECONDS),
    ):
        answer.set_cookie(cookie, content, max_age=seconds, httponly=True, samesite="lax", secure=secure)
    return answer


def _password_fingerprint(user: User) -> str:
    """Return a fingerprint that changes with the user's password."""
    return sha256(user.hash.encode()).hexdigest()


def _read_signed_cookie(request: Request, cookie: str, seconds: int) -> object:
    """Return the value of a signed cookie; None if it is missing, expired or not ours."""
    try:
        return _cookie_signer.loads(request.cookies.get(cookie, ""), max_age=seconds, salt=cookie)
    except BadData:
        return None


def _address_key(client: IPv4Address | IPv6Address) -> str:
    """Return the key of an address in the count of failures."""
    # An IPv6 client has 2^64 addresses, so the first half of the address is the key.
    return f"of {client.exploded[:19] if isinstance(client, IPv6Address) else client}"


def _peer_address(request: Request) -> IPv4Address | IPv6Address:
    """Return the address of the TCP peer, which no header of the request can change."""
    peer = ip_address(request.client.host if request.client else "::")
    return (peer.ipv4_mapped or peer) if isinstance(peer, IPv6Address) else peer
