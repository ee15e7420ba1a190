"""examples/serve.py: streams tokens of several requests, and survives the death of a rank."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")

SERVE = Path(__file__).parents[2] / "examples/serve.py"


class Server:
    """The server as a user starts it, and a client for it."""

    def __init__(self, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SERVE), "--port", "0", *options],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.printed = []
        for line in self.process.stdout:
            self.printed.append(line)
            if found := re.match(r"serving on (\S+) with ranks (.*)", line):
                self.address, self.ranks = found[1], [int(pid) for pid in found[2].split()]
                threading.Thread(target=self._read, daemon=True).start()
                return
        raise AssertionError(f"it did not start: {self.printed}")

    def _read(self) -> None:
        self.printed.extend(self.process.stdout)

    def post(self, body, each=lambda lines: None) -> list[dict]:
        """The lines of an answer; `each` is called after every one of them."""
        request = urllib.request.Request(f"{self.address}/generate", json.dumps(body).encode())
        lines = []
        with urllib.request.urlopen(request, timeout=120) as answer:
            for line in answer:
                lines.append(json.loads(line))
                each(lines)
        return lines

    def stats(self) -> dict:
        with urllib.request.urlopen(f"{self.address}/stats", timeout=60) as answer:
            return json.load(answer)


@pytest.fixture(scope="module")
def server():
    made = Server("--size", "32", "--layers", "1", "--compare", "--tokens", "3")
    yield made
    made.process.send_signal(signal.SIGINT)
    made.process.wait(30)


def tokens(lines: list[dict]) -> list[int]:
    assert lines[-1] == {"done": True, "tokens": len(lines) - 1}, lines[-1]
    return [line["token"] for line in lines[:-1]]


def test_it_compares_itself_with_torch(server):
    text = "".join(server.printed)
    for phase in ("prefill", "decode"):
        found = re.search(rf"{phase} .* tokens/s, .* ms .* tokens/s, .* ms +([\d.]+)x", text)
        assert float(found[1]) > 0


def test_requests_are_batched_and_give_the_same_tokens(server):
    prompts = [[1, 2, 3], [7], [5, 6, 7, 8, 9]]
    alone = [tokens(server.post({"prompt": p, "tokens": 6})) for p in prompts]
    together = [None] * len(prompts)

    def ask(number: int) -> None:
        together[number] = tokens(server.post({"prompt": prompts[number], "tokens": 6}))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert together == alone
    assert all(len(some) == 6 for some in alone)
    stats = server.stats()
    assert stats["decode"]["tokens"] > 0
    assert stats["prefill"]["ms/token"] > 0


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"prompt": []}, "list of tokens"),
        ({"prompt": [1], "tokens": 0}, "from 1 to 4096"),
        ([], "object"),
    ],
)
def test_a_wrong_request_is_refused(server, body, said):
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.post(body)
    assert refused.value.code == 400
    assert said in json.load(refused.value)["error"]


def test_it_survives_the_death_of_a_rank(server):
    body = {"prompt": [4, 4, 2], "tokens": 40}
    want = tokens(server.post(body))

    def kill(lines: list[dict]) -> None:
        if len(lines) == 3:
            os.kill(server.ranks[1], signal.SIGKILL)

    assert tokens(server.post(body, kill)) == want, "the answer goes on where it was"
    assert server.stats()["groups"] == 2
    assert any("restarting the ranks: rank" in line for line in server.printed)
