"""The studio's server: who may ask, how much, and what becomes of questions nobody waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette")
from starlette.testclient import TestClient

from weft.errors import Unsupported
from weft.studio.presets import MOST_BYTES
from weft.studio.web_app import make_app
from weft.studio.worker import Stale, WorkerQueue

TOKEN, PORT = "token-of-the-test", 8123
BASE = f"http://127.0.0.1:{PORT}"


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(make_app(TOKEN, PORT), base_url=BASE) as started:
        yield started


def test_the_page_is_offline_and_safe(client: TestClient) -> None:
    answer = client.get(f"/{TOKEN}/")
    assert answer.status_code == 200
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["referrer-policy"] == "no-referrer"
    for name in ("studio.css", "studio.js", "timelines.js", "charts.js", "live.js", "plotly.js"):
        assert client.get(f"/{TOKEN}/{name}").status_code == 200


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/", {}),
        ("/wrong/api/about", {}),
        ("/api/about", {}),
        (f"/{TOKEN}x/api/about", {}),
        (f"/{TOKEN}/api/about", {"host": "evil.example"}),
        (f"/{TOKEN}/api/about", {"host": f"evil.example:{PORT}"}),
        (f"/{TOKEN}/api/about", {"host": "127.0.0.1:1"}),
        (f"/{TOKEN}/api/about", {"origin": "http://evil.example"}),
        (f"/{TOKEN}/api/about", {"origin": "null"}),
        (f"/{TOKEN}/api/about", {"origin": "http://127.0.0.1:1"}),
        (f"/{TOKEN}/api/about", {"sec-fetch-site": "cross-site"}),
    ],
)
def test_strangers_are_refused(client: TestClient, path: str, headers: dict[str, str]) -> None:
    answer = client.get(path, headers=headers)
    assert answer.status_code == 403
    assert answer.text.startswith("refused: ")


def test_the_own_page_may_ask(client: TestClient) -> None:
    for headers in ({}, {"origin": BASE}, {"host": f"localhost:{PORT}"}):
        assert client.get(f"/{TOKEN}/api/about", headers=headers).status_code == 200


def test_no_file_but_the_pages_is_served(client: TestClient) -> None:
    for name in ("server.py", "..%2fserver.py", "%2fetc%2fpasswd", "__init__.py"):
        assert client.get(f"/{TOKEN}/{name}").status_code == 404


def test_what_is_too_large_or_wrong_is_refused_in_a_sentence(client: TestClient) -> None:
    for path in (
        "quick?m=0",
        "full?world=99",
        "map?row=x",
        "quick?rank=-1",
        "curve?machine=x.toml",
    ):
        answer = client.get(f"/{TOKEN}/api/{path}")
        assert answer.status_code == 400, path
        assert answer.json()["error"]
    answer = client.post(f"/{TOKEN}/api/config", content=b" " * (MOST_BYTES + 1))
    assert answer.status_code == 400
    assert "at most" in answer.json()["error"]
    assert client.post(f"/{TOKEN}/api/about").status_code == 405


def test_answers_come_from_the_workers(client: TestClient) -> None:
    small = "m=1024&n=1024&k=1024&world=2"
    (one,) = client.get(f"/{TOKEN}/api/quick?{small}&tab=a&rank=all").json()["machines"]
    assert {rank for rank, _ in one["timelines"][0]["lanes"]} == {0, 1}
    assert client.get(f"/{TOKEN}/api/full?{small}&tab=a").json()["verdict"]
    trace = client.get(f"/{TOKEN}/api/trace?{small}&tab=a")
    assert "attachment" in trace.headers["content-disposition"]
    assert any(event["ph"] == "X" for event in trace.json()["traceEvents"])
    copies = client.get(f"/{TOKEN}/api/copies?{small}").json()
    assert "weft explore --machine mi300x" in copies["command"]


def _echo(value: Any, check: Any) -> Any:
    check()
    return value


def _until_stale(check: Any) -> None:
    while True:
        check()


def _forever(check: Any) -> None:
    while True:
        pass


def test_a_lane_answers_the_newest_of_a_tab_and_every_tab() -> None:
    async def asked() -> list[Any]:
        lane = WorkerQueue()
        try:
            running = asyncio.create_task(lane.ask("one", _until_stale))
            await asyncio.sleep(0)  # it takes the lane
            waiting = [asyncio.create_task(lane.ask("one", _echo, n)) for n in range(3)]
            other = asyncio.create_task(lane.ask("two", _echo, "other tab"))
            found = await asyncio.gather(running, *waiting, other, return_exceptions=True)
            cancelled = [asyncio.create_task(lane.ask(f"one {n}", _until_stale)) for n in range(2)]
            await asyncio.sleep(0)
            lane.cancel("one")  # the running and the waiting question of the tab
            return found + await asyncio.gather(*cancelled, return_exceptions=True)
        finally:
            lane.close()

    running, first, second, third, other, *cancelled = asyncio.run(asked())
    assert all(isinstance(one, Stale) for one in (running, first, second, *cancelled))
    assert (third, other) == (2, "other tab")


def test_a_lane_outlives_an_answer_that_never_comes() -> None:
    async def asked() -> tuple[Any, Any]:
        lane = WorkerQueue()
        try:
            await lane.ask("one", _echo, 0)
            lane._limit = 0.2
            with pytest.raises(Unsupported, match="took more than"):
                await lane.ask("one", _forever)
            lane._limit = 60.0
            return await lane.ask("one", _echo, 1), await lane.ask("one", _echo, 2)
        finally:
            lane.close()

    assert asyncio.run(asked()) == (1, 2)
