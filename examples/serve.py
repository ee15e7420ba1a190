"""A server that generates tokens with a Llama over two tensor-parallel ranks.

    pip install aiohttp
    python examples/serve.py --port 8000 --compare
    curl -N localhost:8000/generate -d '{"prompt": [1, 2, 3], "tokens": 8}'

- Continuous batching: a request joins the batch as soon as its prompt is processed, and leaves it
  when it has its tokens. Each line of the answer is one token, sent when it is made.
- If a rank dies, the group is started anew. Requests under way go on from the tokens that they
  have; one that has seen too many restarts ends with a line that says why.
- `--compare` first measures prefill and decode beside torch's parallel styles on gloo, with the
  same weights and the same tokens, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
from collections import deque
from dataclasses import dataclass, field

from aiohttp import web
from serve_ranks import Ranks, RanksLost, Sizes

MOST_RESTARTS = 2
"""A request that was under way in more restarts than this fails."""


@dataclass
class Request:
    """A request: what it asks for, and the tokens that it has so far."""

    number: int
    prompt: list[int]
    wanted: int
    loop: asyncio.AbstractEventLoop
    answers: asyncio.Queue = field(default_factory=asyncio.Queue)
    tokens: list[int] = field(default_factory=list)
    restarts: int = 0
    gone: bool = False

    def tell(self, answer: dict) -> None:
        self.loop.call_soon_threadsafe(self.answers.put_nowait, answer)


class Engine(threading.Thread):
    """Runs the batch: one step after another, in a thread of its own."""

    def __init__(self, sizes: Sizes, most: int) -> None:
        super().__init__(daemon=True)
        self.sizes, self.most = sizes, most
        self.ranks = Ranks(sizes)
        self.groups = 1
        self.new: deque[Request] = deque()
        self.active: list[Request] = []
        self.stopped = False
        self.work = threading.Event()
        self.spent = {"prefill": [0, 0.0], "decode": [0, 0.0]}
        """Tokens and seconds by phase."""

    def submit(self, request: Request) -> None:
        self.new.append(request)
        self.work.set()

    def run(self) -> None:
        while not self.stopped:
            if not self.new and not self.active:
                self.work.wait(0.1)
                self.work.clear()
                continue
            try:
                self._step()
            except RanksLost as lost:
                self._restart(str(lost))
        self.ranks.end()

    def _step(self) -> None:
        """Admits new requests, makes one token for each request under way, and ends those that have
        all of theirs."""
        while self.new and len(self.active) < self.most:
            self.active.append(self.new.popleft())
            self._prefill(self.active[-1])
        for request in [r for r in self.active if len(r.tokens) >= r.wanted or r.gone]:
            self.active.remove(request)
            self.ranks.call("drop", request.number)
            request.tell({"done": True, "tokens": len(request.tokens)})
        if not self.active:
            return
        batch = [(request.number, request.tokens[-1:]) for request in self.active]
        made, seconds = self.ranks.call("step", batch)
        self._count("decode", len(batch), seconds)
        for request, token in zip(self.active, made, strict=True):
            self._give(request, token)

    def _prefill(self, request: Request) -> None:
        """Processes a prompt, and after a restart the tokens that were made already, too."""
        rows = request.prompt + request.tokens
        made, seconds = self.ranks.call("step", [(request.number, rows)])
        self._count("prefill", len(rows), seconds)
        self._give(request, made[0])

    def _give(self, request: Request, token: int) -> None:
        if len(request.tokens) < request.wanted:
            request.tokens.append(token)
            request.tell({"token": token})

    def _count(self, phase: str, tokens: int, seconds: float) -> None:
        self.spent[phase][0] += tokens
        self.spent[phase][1] += seconds

    def _restart(self, reason: str) -> None:
        """Starts the group anew, and the requests that were under way with it."""
        print(f"restarting the ranks: {reason}", flush=True)
        self.ranks.end()
        waiting, self.active = self.active, []
        for request in waiting:
            request.restarts += 1
            if request.restarts > MOST_RESTARTS:
                times = f"{request.restarts} times while this request was under way"
                request.tell({"error": f"the ranks were lost {times}: {reason}; send it again"})
            else:
                self.new.appendleft(request)
        try:
            self.ranks = Ranks(self.sizes)
        except RanksLost as lost:
            for request in [*self.new]:
                request.tell({"error": f"the ranks cannot be started: {lost}; ask the operator"})
            self.new.clear()
            return
        self.groups += 1

    def stats(self) -> dict:
        found: dict = {"groups": self.groups, "active": len(self.active), "waiting": len(self.new)}
        for phase, (tokens, seconds) in self.spent.items():
            found[phase] = {
                "tokens": tokens,
                "tokens/s": round(tokens / seconds, 1) if seconds else None,
                "ms/token": round(1e3 * seconds / tokens, 3) if tokens else None,
            }
        return found


def asked(body: object, sizes: Sizes) -> tuple[list[int], int]:
    """The prompt and the number of tokens of a request; raises ValueError with what is wrong."""
    if not isinstance(body, dict):
        raise ValueError("the body must be an object with prompt and tokens")
    prompt, count = body.get("prompt"), body.get("tokens", 16)
    valid = isinstance(prompt, list) and prompt and all(isinstance(t, int) for t in prompt)
    if not valid or not all(0 <= t < sizes.vocabulary for t in prompt):
        raise ValueError(f"prompt must be a list of tokens from 0 to {sizes.vocabulary - 1}")
    if not isinstance(count, int) or not 1 <= count <= 4096:
        raise ValueError("tokens must be from 1 to 4096")
    return prompt, count


def application(engine: Engine) -> web.Application:
    """The HTTP interface: POST /generate, GET /stats."""
    numbers = iter(range(10**9))

    async def generate(http: web.Request) -> web.StreamResponse:
        try:
            prompt, count = asked(await http.json(), engine.sizes)
        except ValueError as wrong:
            return web.json_response({"error": str(wrong)}, status=400)
        request = Request(next(numbers), prompt, count, asyncio.get_running_loop())
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(http)
        engine.submit(request)
        try:
            while True:
                answer = await request.answers.get()
                await response.write(json.dumps(answer).encode() + b"\n")
                if "token" not in answer:
                    break
        finally:
            request.gone = True  # also if the client has gone
        await response.write_eof()
        return response

    async def stats(http: web.Request) -> web.Response:
        return web.json_response(engine.stats())

    app = web.Application()
    app.router.add_post("/generate", generate)
    app.router.add_get("/stats", stats)
    return app


def show(found: dict) -> None:
    """Prints the comparison."""
    print(f"{'':<9}{'torch + gloo':>24}{'weft':>24}{'weft is faster':>18}")
    for phase in ("prefill", "decode"):
        cells = []
        for name in ("torch", "weft"):
            seconds = found[name][phase]
            cells.append(f"{1 / seconds:.0f} tokens/s, {seconds * 1e3:.2f} ms")
        ratio = found["torch"][phase] / found["weft"][phase]
        print(f"{phase:<9}{cells[0]:>24}{cells[1]:>24}{ratio:>17.2f}x", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8000, help="0: any free port")
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8, help="the most requests at once")
    parser.add_argument("--compare", action="store_true", help="measure beside torch's styles")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of the comparison")
    arguments = parser.parse_args()
    sizes = Sizes(arguments.size, 3 * arguments.size, layers=arguments.layers)
    engine = Engine(sizes, arguments.batch)
    if arguments.compare:
        case = {"prompt": 64, "tokens": arguments.tokens, "batch": 4, "rounds": 5}
        show(engine.ranks.call("compare", case, within=600)[0])
    engine.start()

    async def run() -> None:
        runner = web.AppRunner(application(engine))
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", arguments.port)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        ranks = " ".join(str(process.pid) for process in engine.ranks.processes)
        print(f"serving on http://127.0.0.1:{port} with ranks {ranks}", flush=True)
        try:
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()

    try:
        asyncio.run(run())
    except KeyboardInterrupt:
        pass
    finally:
        engine.stopped = True
        engine.join(5)


if __name__ == "__main__":
    main()
