"""Hosts made on this machine: network namespaces joined by a switch, with links as slow as asked.

To torch.distributed and to weft, processes in two of them are on two machines: they reach each
other by TCP over a wire that `tc` paces, and share no memory. Nothing has a name outside this
process, so nothing stays behind, however it ends.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist

from weft.errors import Unsupported

INTERFACE = "net0"
"""The name of a host's one interface to the others."""
STORE_PORT = 29500

_CLONE_NEWNET = 0x40000000
_BURST = 64 * 1024
"""Bytes that a wire lets through at once; the queue before it holds what comes in `_QUEUE`."""
_QUEUE = "200ms"

MTU = 65000
"""Bytes of a packet: large, as cores must do here what network cards do elsewhere, and ranks need
them to compute."""

CONGESTION = "cubic"
"""How TCP finds its rate."""

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Wire:
    """The way from a host to the switch and back. rate: bytes per second in each direction, None is
    as fast as can be. delay: seconds that it adds. loss: the share of packets that it drops."""

    rate: float | None = None
    delay: float = 0.0
    loss: float = 0.0


@dataclass(frozen=True)
class Place:
    """Where a process is to be: its host's network (an open file of a process), and the address of
    the host that has the store."""

    network: str
    store: str

    def enter(self) -> None:
        """Moves this process there; it must have no other threads yet."""
        fd = os.open(self.network, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _enter(fd)
        finally:
            os.close(fd)
        # Names do not resolve there, so gloo must be told by which interface it is reached.
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


class Hosts:
    """Some hosts, for as long as a `with` block lasts."""

    def __init__(self, count: int, wire: Wire | None = None) -> None:
        reason = missing()
        if reason is not None:
            raise Unsupported(f"hosts cannot be made on this machine: {reason}")
        self.count = count
        self._wire = wire or Wire()
        self._switch = -1
        self._networks: list[int] = []

    def __enter__(self) -> Self:
        try:
            self._switch = _new_network()
            _run(self._switch, f"ip link add switch mtu {MTU} type bridge")
            _run(self._switch, "ip link set switch up")
            for host in range(self.count):
                self._networks.append(_new_network())
                self._connect(host)
            self.set_wire(self._wire)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives the networks back; processes that are still in one keep it."""
        for fd in [self._switch, *self._networks]:
            if fd >= 0:
                os.close(fd)
        self._switch, self._networks = -1, []

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def place(self, host: int) -> Place:
        """Where processes of a host are to be, while this process lives."""
        network = f"/proc/{os.getpid()}/fd/{self._networks[host]}"
        return Place(network, self.address(0))

    def run(self, host: int, command: str) -> str:
        """What a command prints that runs on a host."""
        return _run(self._networks[host], command)

    def set_wire(self, wire: Wire, hosts: Sequence[int] | None = None) -> None:
        """Sets the wires of some hosts (None: of all) anew."""
        for host in range(self.count) if hosts is None else hosts:
            for network, device in self._ends(host):
                _pace(network, device, wire)

    def unplug(self, host: int) -> None:
        """Takes a host off the network: what it sends from now on is lost, and so is its answer."""
        _run(self._switch, f"ip link set {_port(host)} down")

    def plug(self, host: int) -> None:
        _run(self._switch, f"ip link set {_port(host)} up")

    def _ends(self, host: int) -> list[tuple[int, str]]:
        return [(self._networks[host], INTERFACE), (self._switch, _port(host))]

    def _connect(self, host: int) -> None:
        network = self._networks[host]
        there = f"/proc/{os.getpid()}/fd/{network}"
        port = _port(host)
        _run(
            self._switch,
            f"ip link add {port} mtu {MTU} type veth peer name {INTERFACE} mtu {MTU} netns {there}",
        )
        _run(self._switch, f"ip link set {port} master switch up")
        _run(network, f"ip address add {self.address(host)}/24 dev {INTERFACE}")
        _run(network, f"ip link set {INTERFACE} up")
        _run(network, "ip link set lo up")
        # Linux's own default, whatever this machine has: figures are to be the same elsewhere.
        setting = f"echo {CONGESTION} > /proc/sys/net/ipv4/tcp_congestion_control"
        _run(network, ["sh", "-c", setting], may_fail=True)


def missing() -> str | None:
    """Why no hosts can be made here; None where they can."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no `{tool}`; on Debian: apt-get install iproute2"
    try:
        os.close(_new_network())
    except OSError as failure:
        return f"this process may not make network namespaces ({failure.strerror}); run as root"
    return None


def pace_own(wire: Wire) -> None:
    """Sets the wire that leaves the host which this process is on; one rank of each host does."""
    _pace(None, INTERFACE, wire)


def together(function: Callable[[], object], ahead: float = 0.008) -> float:
    """Seconds of one call that all ranks start at the same moment; collective. A barrier over a
    network lets ranks go at different ones, but hosts of one machine have one clock. ahead: seconds
    for all to hear of it."""
    start = torch.tensor(time.monotonic() + ahead, dtype=torch.float64)
    dist.all_reduce(start, dist.ReduceOp.MAX)
    while time.monotonic() < start.item():  # awake: a core that has slept is slow at first
        pass
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def _port(host: int) -> str:
    return f"port{host}"


def _pace(network: int | None, device: str, wire: Wire) -> None:
    """Sets what leaves a device: its rate, then delay and loss."""
    _run(network, f"tc qdisc del dev {device} root", may_fail=True)
    _run(network, f"tc qdisc del dev {device} ingress", may_fail=True)
    if wire.rate is not None:
        _run(
            network,
            f"tc qdisc add dev {device} root handle 1: tbf rate {int(wire.rate)}bps "
            f"burst {_BURST} latency {_QUEUE}",
        )
    if wire.delay:
        parent = "parent 1:" if wire.rate is not None else "root"
        delay = int(wire.delay * 1e6)
        try:
            _run(network, f"tc qdisc add dev {device} {parent} netem delay {delay}us limit 100000")
        except Unsupported as failure:
            raise Unsupported(f"this kernel cannot delay packets (netem): {failure}") from None
    if wire.loss:
        # A filter that drops by chance: load a random number, compare, drop or let pass. Not every
        # kernel has netem, which does the same.
        random, drop, keep = 0xFFFFF000 + 56, 2, 0
        program = f"4,32 0 0 {random},37 1 0 {int(wire.loss * 2**32)},6 0 0 {drop},6 0 0 {keep}"
        _run(network, f"tc qdisc add dev {device} ingress")
        words = f"tc filter add dev {device} ingress bpf da bytecode".split()
        _run(network, [*words, program])


def _new_network() -> int:
    """A network of its own, as an open file; it goes when that and the last process in it are."""
    made: list[int | OSError] = []

    def make() -> None:  # in a thread, for only that is moved there
        if _libc.unshare(_CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            made.append(OSError(number, os.strerror(number)))
            return
        own = f"/proc/self/task/{threading.get_native_id()}/ns/net"
        made.append(os.open(own, os.O_RDONLY | os.O_CLOEXEC))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    found = made[0]
    if isinstance(found, OSError):
        raise found
    return found


def _enter(network: int) -> None:
    if _libc.setns(network, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _run(network: int | None, command: str | list[str], may_fail: bool = False) -> str:
    words = command.split() if isinstance(command, str) else command
    done = subprocess.run(
        words,
        preexec_fn=None if network is None else lambda: _enter(network),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    if done.returncode and not may_fail:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise Unsupported(f"`{' '.join(words)}` failed: {said[0] if said else done.returncode}")
    return done.stdout
