"""One call on a device: this rank posts its header, agrees with its peers or trusts them to repeat
the last call, and enqueues its program."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from weft.errors import Error, Mismatch, PeerLost, Unsupported
from weft.fabric.deadlines import own_time
from weft.fabric.device.board import BoardHeader, differing
from weft.fabric.device.device_driver import AT_LEAST
from weft.fabric.device.program import DeviceProgram
from weft.fabric.interface import Program
from weft.fabric.outcomes import OK, Outcome
from weft.fabric.proposal import PEERS_DECIDE, Proposal, check_same
from weft.fabric.rendezvous import listed

if TYPE_CHECKING:
    from weft.fabric.device.device_fabric import DeviceFabric


class DeviceCall:
    """A call under way on this rank. Made by `fabric.call`, as a context."""

    def __init__(self, fabric: DeviceFabric, proposal: Proposal, expected: Program | None) -> None:
        self.fabric = fabric
        self.label = proposal.operation
        self.number = 0
        self.known = False
        """Whether the call is enqueued without waiting for the headers of peers."""
        self.captured = False
        self._proposal = proposal
        self._expected = expected
        self._entered = self._enqueued = False

    def __enter__(self) -> DeviceCall:
        fabric = self.fabric
        fabric.lock.acquire()
        try:
            self.stream = torch.accelerator.current_stream(fabric.device)
            self.captured = fabric.driver.capturing(self.stream)
            self.number = fabric.next_call()
            self._follow()
            expected, proposal = self._expected, self._proposal
            if self.captured:
                if not isinstance(expected, DeviceProgram) and not proposal.error:
                    error = Unsupported(
                        f"{proposal.operation} was not called with these sizes before; call it "
                        "once before you capture it, so that its plan and memory exist"
                    )
                    fabric.board.post(self.number, Proposal.of_error(self.label, error), False)
                    self.headers()
                    raise error
                proposal = Proposal(
                    f"a capture of {proposal.operation}", proposal.same, proposal.own
                )
            elif isinstance(expected, DeviceProgram) and self._may_repeat(expected):
                self.known = self._may_be_known(expected)
            fabric.board.post(self.number, proposal, self.known)
        except BaseException as error:
            try:
                if self.number and not isinstance(error, Error):
                    self._give_up(error)
            finally:
                fabric.lock.release()
            raise
        return self

    def _follow(self) -> None:
        """Calls of a group run one after another on the device, also if they come from several
        streams: they share words and memory. A graph has its own."""
        last = self.fabric.last_end
        if not self.captured and last is not None and last[0] != self.stream:
            self.stream.wait_event(last[1])

    def _may_repeat(self, expected: DeviceProgram) -> bool:
        """Whether a call with known arguments may run without the headers of peers."""
        open_sizes = (PEERS_DECIDE, True) in self._proposal.same
        return expected.optimistic and self.fabric.trusting and not open_sizes

    def _may_be_known(self, expected: DeviceProgram) -> bool:
        """Whether no peer has posted anything else than expected so far."""
        board = self.fabric.board
        found = (board.signature(self.number, peer) for peer in self.fabric.peers)
        wanted = (expected.signatures[peer] for peer in self.fabric.peers)
        return all(one is None or one == other for one, other in zip(found, wanted, strict=True))

    # -- agreement ---------------------------------------------------------------------------------

    def headers(self) -> list[BoardHeader]:
        """The headers of all ranks; the host waits for them."""
        fabric = self.fabric
        until = own_time() + fabric.deadline
        while fabric.board.missing(self.number):
            fabric.wait_a_moment(until, "all ranks to enter the call", self.label)
        found = fabric.board.headers(self.number)
        fabric.board.seen(self.number)
        return found

    def differs(self, signatures: Sequence[int]) -> bool:
        """Whether the headers of the ranks are others than a program was made for."""
        if self.captured:
            self.proposals()
            return False
        return differing(self.headers(), signatures)

    def proposals(self) -> list[Proposal]:
        headers = self.headers()
        found = [header.proposal() for header in headers]
        check_same(found, self.number)
        ahead = [rank for rank, header in enumerate(headers) if header.known]
        # A rank runs ahead only with sizes that were alike on all ranks.
        if ahead and differing(headers, [headers[0].signature] * len(headers)):
            raise Mismatch(
                f"{listed(ahead)} repeated the last sizes in call {self.number} of {self.label}, "
                "but a peer has others; set WEFT_AGREE=each if the sizes of "
                "single ranks change between calls"
            )
        return found

    def addresses(self, slot: int) -> list[int]:
        raise AssertionError("calls on a device need no addresses")

    def peer_failure(self) -> Outcome | None:
        outcome = self.fabric.peer_state()
        return outcome if outcome[0] != OK else None

    # -- on the device -----------------------------------------------------------------------------

    def enter(self) -> None:
        """Enqueues this rank's entry into the call, which peers wait for."""
        fabric = self.fabric
        self._entered = True
        for peer in fabric.peers:
            word = fabric.meeting_word(peer, fabric.rank)
            fabric.driver.post(word, self.number, self.stream)
        self.began = self.stream.record_event()

    def issued(self, program: DeviceProgram) -> None:
        """The whole call is enqueued."""
        self._enqueued = True
        if self.captured:
            self.fabric.watchdog.add_graph(program)
        else:
            self._end(program)

    def _end(self, program: DeviceProgram | None) -> None:
        ended = self.stream.record_event()
        self.fabric.last_end = (self.stream, ended)
        self.fabric.watchdog.add(self, program, ended)

    def _pass(self) -> None:
        """Takes part in a call that was refused, so that the order of calls on the device stays
        what it is: every rank enters every call, and waits for the entry of all others."""
        fabric = self.fabric
        if self.captured or fabric.broken is not None:
            return
        if not self._entered:
            self.enter()
        for peer in fabric.peers:
            word = fabric.meeting_word(fabric.rank, peer)
            fabric.driver.wait(word, self.number, self.stream, AT_LEAST)
        self._end(None)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        fabric = self.fabric
        try:
            if self._enqueued:
                pending, fabric.pending = fabric.pending, None
                if error is None and pending is not None:
                    raise pending
            elif error is None or (isinstance(error, Error) and not self._entered):
                self._pass()
            else:
                self._give_up(error)
        finally:
            fabric.lock.release()

    def _give_up(self, error: BaseException) -> None:
        """Ends the group after an error: part of the call may be enqueued, and peers would wait for
        the rest."""
        reason = f"rank {self.fabric.rank} failed in call {self.number}: {error}"
        self.fabric.give_up(PeerLost(reason, self.fabric.rank))
