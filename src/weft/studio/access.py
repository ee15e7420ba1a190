"""Who may ask: requests that know the token, name this machine as their host, and come from the
studio's own page. Everything else is refused before it reaches a route."""

from __future__ import annotations

from dataclasses import dataclass
from hmac import compare_digest

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


@dataclass(frozen=True)
class AccessCheck:
    """Checks Host, Origin and the token, which is the first part of every path."""

    app: ASGIApp
    token: str
    port: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        reason = self.refuses(Headers(scope=scope), scope["path"])
        if reason is not None:
            await PlainTextResponse(reason, 403)(scope, receive, send)
            return

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [(k.encode(), v.encode()) for k, v in _HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        await self.app(scope, receive, send_safely)

    def refuses(self, headers: Headers, path: str) -> str | None:
        """Why a request is refused; None if it is not."""
        hosts = {f"127.0.0.1:{self.port}", f"localhost:{self.port}"}
        if headers.get("host") not in hosts:
            return "refused: the request is not for this host"
        origin = headers.get("origin")
        if origin is not None and origin not in {f"http://{host}" for host in hosts}:
            return "refused: the request comes from another site"
        if headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            return "refused: the request comes from another site"
        given = path.removeprefix("/").split("/", 1)[0]
        if not compare_digest(given.encode(), self.token.encode()):
            return "refused: open the link that `weft studio` printed; it carries a token"
        return None
