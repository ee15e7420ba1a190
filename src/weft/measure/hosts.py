"""Emulated hosts on this machine: network namespaces, joined by a switch with paced links.

For torch.distributed and for weft, processes in two namespaces are on two machines: they reach each
other by TCP over a link that `tc` paces, and share no memory. The namespaces have no names outside
this process, so nothing is left behind, however it ends.
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
"""The name of the network interface of a host."""
STORE_PORT = 29500

_CLONE_NEWNET = 0x40000000
_BURST = 64 * 1024
"""The burst of a wire, in bytes. The queue in front of it holds the bytes of `_QUEUE` seconds."""
_QUEUE = "200ms"

MTU = 65000
"""Bytes per packet. Packets are large, because cores do the work of network cards here, and ranks
need the cores to compute."""

CONGESTION = "cubic"
"""The congestion control of TCP."""

_PATIENCE = 300.0
"""Seconds that a command may take. They take milliseconds, but they wait for threads of the kernel,
which a busy machine may let wait for a minute."""

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Wire:
    """The link between a host and the switch. rate: bytes per second in each direction (None: no
    limit). delay: added seconds. loss: the share of packets that are dropped."""

    rate: float | None = None
    delay: float = 0.0
    loss: float = 0.0


@dataclass(frozen=True)
class Place:
    """The place of a process: the network of its host (an open file of a process), and the address
    of the host with the store."""

    network: str
    store: str

    def enter(self) -> None:
        """Moves this process there. It must not have other threads yet."""
        fd = os.open(self.network, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _enter(fd)
        finally:
            os.close(fd)
        # Host names do not resolve there, so gloo needs the name of the interface.
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


class Hosts:
    """Emulated hosts, which exist until the end of a `with` block."""

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
        """Closes the networks. A network with processes in it stays until they end."""
        for fd in [self._switch, *self._networks]:
            if fd >= 0:
                os.close(fd)
        self._switch, self._networks = -1, []

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def place(self, host: int) -> Place:
        """The place for processes of a host. It is valid while this process lives."""
        network = f"/proc/{os.getpid()}/fd/{self._networks[host]}"
        return Place(network, self.address(0))

    def run(self, host: int, command: str) -> str:
        """Runs a command on a host and returns its output."""
        return _run(self._networks[host], command)

    def set_wire(self, wire: Wire, hosts: Sequence[int] | None = None) -> None:
        """Changes the wires of some hosts (None: of all hosts)."""
        for host in range(self.count) if hosts is None else hosts:
            for network, device in self._ends(host):
                _pace(network, device, wire)

    def unplug(self, host: int) -> None:
        """Disconnects a host: from now on, nothing that it sends or that is sent to it arrives."""
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
        # The default of Linux, whatever this machine uses, so that figures are comparable.
        setting = f"echo {CONGESTION} > /proc/sys/net/ipv4/tcp_congestion_control"
        _run(network, ["sh", "-c", setting], may_fail=True)


def missing() -> str | None:
    """The reason why hosts cannot be emulated on this machine, or None if they can."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no `{tool}`; on Debian: apt-get install iproute2"
    try:
        os.close(_new_network())
    except OSError as failure:
        return f"this process may not make network namespaces ({failure.strerror}); run as root"
    return None


def pace_own(wire: Wire) -> None:
    """Changes the outgoing wire of this process's host. One rank of each host calls it."""
    _pace(None, INTERFACE, wire)


def together(function: Callable[[], object], ahead: float = 0.008) -> float:
    """The seconds of one call that all ranks start at the same moment. Collective.

    After a barrier over a network, ranks continue at different moments. But the emulated hosts have
    one clock, so the ranks agree on a moment, `ahead` seconds later.
    """
    start = torch.tensor(time.monotonic() + ahead, dtype=torch.float64)
    dist.all_reduce(start, dist.ReduceOp.MAX)
    while time.monotonic() < start.item():  # spin: a core that has slept is slow at first
        pass
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def _port(host: int) -> str:
    return f"port{host}"


def _pace(network: int | None, device: str, wire: Wire) -> None:
    """Sets the rate, delay and loss of what a network device sends."""
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
        # A BPF filter that drops at random: load a random number, compare, drop or keep. netem does
        # the same, but not every kernel has it.
        random, drop, keep = 0xFFFFF000 + 56, 2, 0
        program = f"4,32 0 0 {random},37 1 0 {int(wire.loss * 2**32)},6 0 0 {drop},6 0 0 {keep}"
        _run(network, f"tc qdisc add dev {device} ingress")
        words = f"tc filter add dev {device} ingress bpf da bytecode".split()
        _run(network, [*words, program])


def _new_network() -> int:
    """A new network namespace, as an open file. It disappears when the file is closed and the last
    process in it has ended."""
    made: list[int | OSError] = []

    def make() -> None:  # in a thread, because only this thread is moved there
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
    try:
        done = subprocess.run(
            words,
            preexec_fn=None if network is None else lambda: _enter(network),
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Unsupported(f"`{' '.join(words)}` did not end within {_PATIENCE:g} s") from None
    if done.returncode and not may_fail:
        output = (done.stderr or done.stdout).strip().splitlines()
        raise Unsupported(f"`{' '.join(words)}` failed: {output[0] if output else done.returncode}")
    return done.stdout
