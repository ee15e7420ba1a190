"""The studio's server: its page and its answers, under a path that begins with the token."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import lru_cache
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from weft.dtype import MULTIPLIED
from weft.errors import Error, Unsupported
from weft.machine import load
from weft.report.page import plotly_js
from weft.report.perfetto import trace_events
from weft.studio import answers, presets, snippets, words
from weft.studio.access import AccessCheck
from weft.studio.live import LiveRuns
from weft.studio.live_case import LiveCase, has_loom
from weft.studio.state import SHARED_SIZE, State, machine_names
from weft.studio.worker import Stale, WorkerQueue

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
FILES = ("studio.html", "studio.css", "studio.js", "timelines.js", "charts.js", "live.js")
Handler = Callable[[Request], Awaitable[Response]]


def make_app(token: str, port: int) -> ASGIApp:
    """The ASGI application for a token and the port at which it listens."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        # Movements of a slider never wait behind curves and maps.
        app.state.lanes = {"quick": WorkerQueue(), "heavy": WorkerQueue()}
        app.state.live = LiveRuns()
        try:
            yield
        finally:
            await app.state.live.close()
            for lane in app.state.lanes.values():
                lane.close()

    def route(path: str, handler: Handler, method: str = "GET") -> Route:
        return Route("/{token}/" + path, _safely(handler), methods=[method])

    routes = [
        route("", _page),
        route("api/about", _about),
        route("api/quick", _answer("quick", answers.quick, rank=True)),
        route("api/full", _answer("heavy", answers.full)),
        route("api/curve", _answer("heavy", answers.curve)),
        route("api/map", _map),
        route("api/cancel", _cancel, "POST"),
        route("api/live", _live, "POST"),
        route("api/copies", _copies),
        route("api/trace", _trace),
        route("api/config", _config, "POST"),
        route("{name}", _file),
    ]
    return AccessCheck(Starlette(routes=routes, lifespan=lifespan), token, port)


def _safely(handler: Handler) -> Handler:
    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except Stale:
            return Response(status_code=204)
        except Error as error:
            return JSONResponse({"error": str(error)}, 400)
        except ClientDisconnect:
            return Response(status_code=499)

    return handle


def _asked(request: Request) -> tuple[State, dict[str, str]]:
    """The state of a request, and what else its query says: tab, rank, row."""
    query = dict(request.query_params)
    more: dict[str, str] = {key: query.pop(key) for key in ("tab", "rank", "row") if key in query}
    if any(len(value) > 64 for value in more.values()):
        raise Unsupported("tab, rank and row are short")
    return State.from_query(query), more


def _answer(lane: str, function: Callable[..., Any], rank: bool = False) -> Handler:
    async def answer(request: Request) -> Response:
        state, more = _asked(request)
        key = f"{more.get('tab', '')} {function.__name__}"
        arguments = (state, _rank(more)) if rank else (state,)
        return JSONResponse(await request.app.state.lanes[lane].ask(key, function, *arguments))

    return answer


def _rank(more: dict[str, str]) -> int | None:
    text = more.get("rank", "0")
    if text == "all":
        return None
    if not text.isdecimal():
        raise Unsupported(f"a rank is a number or all, not {text!r}")
    return int(text)


async def _map(request: Request) -> Response:
    state, more = _asked(request)
    row = more.get("row", "0")
    if not row.isdecimal():
        raise Unsupported(f"a row is a number, not {row!r}")
    key = f"{more.get('tab', '')} map"
    lane = request.app.state.lanes["heavy"]
    return JSONResponse(await lane.ask(key, answers.map_row, state, int(row)))


async def _cancel(request: Request) -> Response:
    """Drops what a tab has asked for and does not want any more: all but its newest timelines."""
    request.app.state.lanes["heavy"].cancel(request.query_params.get("tab", "")[:64])
    return Response(status_code=204)


async def _live(request: Request) -> Response:
    """Runs the case on this computer: a line of JSON for every step, while somebody listens."""
    query = dict(request.query_params)
    tab = query.pop("tab", "")[:64]
    lines = request.app.state.live.stream(tab, LiveCase.from_query(query))
    return StreamingResponse(lines, media_type="application/x-ndjson")


async def _copies(request: Request) -> Response:
    state, _ = _asked(request)
    return JSONResponse(
        {
            "command": snippets.command(state),
            "python": snippets.python(state),
            "query": state.to_query(),
        }
    )


async def _trace(request: Request) -> Response:
    state, more = _asked(request)
    lane = request.app.state.lanes["heavy"]
    drawn = await lane.ask(f"{more.get('tab', '')} trace", answers.timelines, state)
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": list(trace_events(drawn))})
    headers = {"content-disposition": 'attachment; filename="weft-trace.json"'}
    return Response(text, media_type="application/json", headers=headers)


async def _config(request: Request) -> Response:
    world = request.query_params.get("world", "8")
    if not world.isdecimal() or len(world) > 4:
        raise Unsupported(f"world is a number, not {world[:20]!r}")
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > presets.MOST_BYTES:
            raise Unsupported(f"a config has at most {presets.MOST_BYTES // 1024} KiB")
    return JSONResponse(presets.read_config(body, int(world)))


async def _about(request: Request) -> Response:
    """What can be chosen."""
    machines = []
    for name in machine_names():
        machine = load(name)
        machines.append(
            {
                "name": name,
                "title": machine.title,
                "world": machine.links.world,
                "link": machine.links.total_bandwidth / 1e9,
                "latency": machine.links.latency * 1e6,
                "engines": machine.engines.count,
                "dtypes": [dtype for dtype in MULTIPLIED if dtype in machine.compute.rate],
            }
        )
    operations = [
        {"name": name, "title": title, "text": text, "sizes": sizes, "shared": SHARED_SIZE[name]}
        for name, (title, text, sizes) in words.OPERATIONS.items()
    ]
    return JSONResponse(
        {
            "machines": machines,
            "operations": operations,
            "presets": presets.presets(8),
            "default": vars(State()),
            "loom": has_loom(),
        }
    )


async def _page(request: Request) -> Response:
    return _content("studio.html")


async def _file(request: Request) -> Response:
    name = request.path_params["name"]
    if name == "plotly.js":
        headers = {"cache-control": "private, max-age=86400"}
        return Response(_plotly(), media_type="text/javascript", headers=headers)
    if name not in FILES:
        return JSONResponse({"error": f"there is no {name[:40]}"}, 404)
    return _content(name)


def _content(name: str) -> Response:
    text = files("weft.studio").joinpath("page", name).read_text("utf-8")
    headers = {"cache-control": "no-store"}
    return Response(text, media_type=_TYPES[name.rsplit(".", 1)[1]], headers=headers)


@lru_cache
def _plotly() -> bytes:
    return plotly_js().encode()
