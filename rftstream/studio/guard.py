"""Checks on every request before a page gets it: host, origin, rate, and owner.

| check | answer | |---|---| | the Host is one of the studio's names (so no other site can be made to point at it) | 421
| | the rate of requests from one address is within the limit | 429 | | a request that changes something comes from a
page of the studio itself | 403 | | a token, or a session that was given for one; on loopback who has none may look |
401, or the page that asks | | who changes something is an annotator or an operator, and does so not too often | 403,
429 | | the body is not too large | 413 |

Each answer carries headers that let a browser run no script, style or frame but the studio's own files.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rftstream.studio.access import Sessions, StudioRole, TokenFile, Viewer

COOKIE = "rftstream_studio"
SAFE = ("GET", "HEAD")
MAX_BODY_BYTES = 64 * 1024
"""Most bytes of a viewer's request."""
MAX_WRITE_BYTES = 1024 * 1024
"""Most bytes of a request of an annotator or an operator, since corrected answers are long."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}

OPEN = ("/login", "/static/")
"""Paths that need no token: the login page and its files."""
FOR_ALL = ("/login", "/logout")
"""Paths to which viewers may send requests, too."""
API = "/api/"
"""Prefix of the paths for programs, which get errors as JSON."""


@dataclass(slots=True, kw_only=True)
class RateLimits:
    """Rate limit for the requests of one address or one person: `burst` at once, and `per_s` over a long time."""

    per_s: float = 50.0
    burst: float = 400.0
    num_addresses: int = 4096
    """Most addresses that are remembered."""
    _left: OrderedDict[str, tuple[float, float]] = field(default_factory=OrderedDict)
    """Address -> requests left, and the time of that count."""

    def take(self, address: str, count: float = 1.0) -> float:
        """Count a request. Return 0 if it may pass, or the seconds until another may come."""
        now = time.monotonic()
        left, at = self._left.pop(address, (self.burst, now))
        left = min(self.burst, left + (now - at) * self.per_s)
        allowed = left >= count
        self._left[address] = (left - count if allowed else left, now)
        if len(self._left) > self.num_addresses:
            self._left.popitem(last=False)
        return 0.0 if allowed else (count - left) / self.per_s


@dataclass(slots=True, kw_only=True)
class GuardRules:
    """The rules of a studio's guard. `server` makes it."""

    hosts: frozenset[str]
    """Names by which the studio is reached, without ports."""
    tokens: TokenFile
    """Tokens and their owners."""
    local: Viewer | None = None
    """Viewer for requests without a token. None: a token is required, since other machines can reach the studio."""
    limits: RateLimits = field(default_factory=RateLimits)
    sessions: Sessions = field(default_factory=Sessions)
    login_limits: RateLimits = field(default_factory=lambda: RateLimits(per_s=0.1, burst=10.0))
    """Limits on attempts to log in."""
    write_limits: RateLimits = field(default_factory=lambda: RateLimits(per_s=2.0, burst=60.0))
    """Limits on the changes of one person, by name."""


class RequestGuard:
    """The outermost ASGI application. It sets `viewer` in the state of each request that it lets pass."""

    def __init__(self, app: ASGIApp, rules: GuardRules) -> None:
        self._app, self._rules = app, rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request, and pass it on or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        refusal = self._refusal(scope)
        await (refusal or self._app)(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        headers, rules, path = Headers(scope=scope), self._rules, scope["path"]
        host, is_safe = _name_of(headers.get("host", "")), scope["method"] in SAFE
        if host not in rules.hosts:
            return refuse(
                path,
                421,
                f"host {host[:100]!r}: this studio is not reached under this name; name it with --public-host",
            )
        address = (scope.get("client") or ("?",))[0]
        if wait_s := rules.limits.take(address):
            return _too_many(path, wait_s)
        if not is_safe and (why := _why_foreign(headers)):
            return refuse(path, 403, why)
        viewer = self._viewer(headers)
        if viewer is None and not path.startswith(OPEN):
            if is_safe and "text/html" in headers.get("accept", "") and not path.startswith(API):
                return RedirectResponse("/login", 303)
            return refuse(path, 401, "a token is needed", {"www-authenticate": "Bearer"})
        most = MAX_BODY_BYTES
        if viewer is not None and not is_safe and path not in FOR_ALL:
            if viewer.role < StudioRole.annotator:
                return refuse(path, 403, f"{viewer.name} is a viewer here, expected an annotator or an operator")
            if wait_s := rules.write_limits.take(viewer.name):
                return _too_many(path, wait_s)
            most = MAX_WRITE_BYTES
        if int(headers.get("content-length") or 0) > most or "transfer-encoding" in headers:
            return refuse(path, 413, f"expected at most {most} bytes with their length")
        scope.setdefault("state", {})["viewer"] = viewer
        return None

    def _viewer(self, headers: Headers) -> Viewer | None:
        """Return the viewer who makes a request. A wrong token gives no viewer, even on this machine."""
        rules = self._rules
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and token:
            return rules.tokens.find(token.strip())
        session = session_name(headers)
        return (rules.sessions.find(session, rules.tokens) if session else None) or rules.local


def refuse(path: str, status: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return the answer to a refused request: JSON for programs, else text."""
    if path.startswith(API):
        return JSONResponse({"error": text}, status, headers)
    return PlainTextResponse(text, status, headers)


def _too_many(path: str, wait_s: float) -> Response:
    return refuse(path, 429, "too many requests", {"retry-after": str(int(wait_s) + 1)})


def session_name(headers: Mapping[str, str]) -> str:
    """Return the name of the browser's session, or an empty text."""
    return cookie_parser(headers.get("cookie", "")).get(COOKIE, "")


def _name_of(host: str) -> str:
    """Return the name in a Host header, without its port."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _why_foreign(headers: Headers) -> str:
    """Return why a writing request does not come from a page of the studio; empty if it does.

    Programs send no Origin, but a token in a header that no other site can set.
    """
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if origin is not None and urlsplit(origin).netloc != headers.get("host"):
        return f"origin {origin[:100]!r}: expected the studio's own"
    if site not in (None, "same-origin", "none"):
        return f"a request from another site ({site[:20]}), expected the studio's own pages"
    if origin is None and site is None and "authorization" not in headers:
        return "no Origin: expected a browser's, or a token in the header Authorization"
    return ""
