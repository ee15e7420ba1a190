"""A state as something to paste: a command of the terminal, or Python."""

from __future__ import annotations

from weft.machine import load
from weft.studio.state import SHARED_SIZE, State

CHANGED = "changed-{}.toml"


def command(state: State) -> str:
    """The `weft explore` command that simulates all schedules of the state."""
    lines = []
    machines = list(state.machine_names)
    if not state.changes.nothing:
        for place, name in enumerate(machines):
            machines[place] = CHANGED.format(name)
            file = state.changes.toml(load(name))
            lines.append(f"cat > {machines[place]} <<'END'\n{file}END")
    m, n, k = explore_sizes(state)
    flags = f"--op {state.op} --m {m} --n {n} --k {k} --world {state.world} --dtype {state.dtype}"
    captured = " --captured" if state.captured else ""
    lines.append(f"weft explore --machine {','.join(machines)} {flags}{captured}")
    return "\n".join(lines)


def python(state: State) -> str:
    """A script that simulates all schedules of the state and prints them, fastest first."""
    given = ", ".join(
        f"{name}={value!r}"
        for name, value in vars(state.changes).items()
        if value != getattr(type(state.changes)(), name)
    )
    used = f"Changes({given}).apply(load(name))" if given else "load(name)"
    changes = "from weft.studio.changes import Changes\n" if given else ""
    m, n, k = explore_sizes(state)
    return (
        "from weft.machine import load\n"
        f"{changes}"
        "from weft.study.exploration import explore\n"
        "from weft.study.scenarios import Shape\n\n"
        f"shape = Shape({m}, {n}, {k}, dtype={state.dtype!r})\n"
        f"for name in {list(state.machine_names)!r}:\n"
        f"    found = explore({used}, {state.op!r}, [shape], {state.world})\n"
        "    for one in sorted(found.scenarios[0].outcomes, key=lambda one: one.seconds):\n"
        '        print(f"{name} {one.schedule} {1e3 * one.seconds:.3f} ms {one.speedup:.2f}x")\n'
    )


def explore_sizes(state: State) -> tuple[int, int, int]:
    """M, N and K as `weft explore` takes them: it always gives each rank N / world columns, so that
    an operation whose ranks share another size needs N times the ranks, and its own share."""
    sizes = {"m": state.m, "n": state.n, "k": state.k}
    axis = SHARED_SIZE[state.op]
    if axis != "n":
        sizes[axis] = -(-sizes[axis] // state.world)
        sizes["n"] *= state.world
    return sizes["m"], sizes["n"], sizes["k"]
