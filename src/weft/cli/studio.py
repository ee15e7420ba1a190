"""`weft studio`: opens a local page to try schedules, machines and sizes."""

from __future__ import annotations

import secrets
import socket
import webbrowser
from typing import Annotated
from urllib.parse import parse_qsl

import typer

from weft.cli.console import Json, console, print_json
from weft.errors import Unsupported


def register(app: typer.Typer) -> None:
    app.command()(studio)


def studio(
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 0,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Whether to open the page.")
    ] = True,
    state: Annotated[
        str, typer.Option(help="What the page shows first: the part of its link after the ?.")
    ] = "",
    json: Json = False,
) -> None:
    """Open a page to see what overlap gives for your layer on your machine, while you drag.

    The page is served to this machine only, under a link with a random token. Ctrl-C ends it.
    """
    try:
        import uvicorn

        from weft.studio.web_app import make_app
    except ImportError as error:
        raise Unsupported(f"the studio needs {error.name}: pip install 'weft[studio]'") from None
    from weft.studio.state import State

    query = State.from_query(dict(parse_qsl(state))).to_query()
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(("127.0.0.1", port))
    except OSError as error:
        raise Unsupported(
            f"port {port} cannot be used ({error.strerror}); choose another, or leave out --port"
        ) from None
    bound.listen(128)  # who follows the link at once waits until the server is ready
    port = bound.getsockname()[1]
    token = secrets.token_urlsafe(24)
    link = f"http://127.0.0.1:{port}/{token}/{'?' + query if query else ''}"
    settings = uvicorn.Config(
        make_app(token, port),
        log_level="warning",
        access_log=False,
        limit_concurrency=64,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(settings)
    if json:
        print_json({"link": link, "token": token, "port": port})
    else:
        console.print(f"weft studio: {link}", soft_wrap=True)
        console.print("For this machine only. Ctrl-C ends it.")
    if browser:
        webbrowser.open(link)
    try:
        server.run(sockets=[bound])
    except KeyboardInterrupt:
        pass
    finally:
        bound.close()
