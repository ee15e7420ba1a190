"""The first call on a group, in which ranks meet: a rank that dies or is interrupted there, or has
died before, is named soon, and nobody waits for the deadline."""

from __future__ import annotations

import json
import os
import re
import signal
import time

import pytest
import torch.distributed as dist
from ranks import check_call, tell
from surviving import WITHIN

from weft import PeerLost, Unsupported
from weft.fabric import rendezvous
from weft.fabric.group import several_machines
from weft.fabric.group.connecting import Door
from weft.fabric.group.streams import Lost
from weft.fabric.host import opening
from weft.fabric.outcomes import PEER_LOST


def lost_at_once(said: str) -> tuple[float, float]:
    """A call that raises because rank 1 is gone; gives the moments of the call and of the error."""
    tell("calling")
    began = time.monotonic()
    with pytest.raises(PeerLost, match=said) as lost:
        check_call(8, 3, 4)
    assert lost.value.rank == 1
    return began, time.monotonic()


@pytest.mark.parametrize("fabric", ["auto", "flat"])
def test_a_rank_that_died_before_the_first_call(fresh_ranks, fabric):
    pool = fresh_ranks(3, WEFT_FABRIC=fabric)
    pool.kill(1)
    for began, heard in pool.start(lost_at_once, "rank 1 died", only=[0, 2]).values():
        assert heard - began < WITHIN


@pytest.mark.parametrize("fabric", ["auto", "flat"])
def test_a_rank_that_dies_while_others_wait_in_the_first_call(fresh_ranks, fabric):
    pool = fresh_ranks(3, WEFT_FABRIC=fabric)
    job = pool.start(lost_at_once, "rank 1 died", only=[0, 2])
    job.hear("calling")
    killed = pool.kill(1)
    for _, heard in job.values():
        assert heard - killed < WITHIN


def opened_too_late() -> float:
    """Rank 0, whose memory the others open, has made its part of the opening and dies then."""
    group, check = dist.group.WORLD, opening._check

    def late(cards, members) -> None:
        check(cards, members)
        opening._check = check
        while rendezvous.posted(group, 0, "opened") is None:
            time.sleep(0.001)
        tell("posted")
        while os.path.exists(f"/proc/{cards[0].pid}/fd/{cards[0].fd}"):
            time.sleep(0.001)

    if dist.get_rank() != 0:
        opening._check = late
    with pytest.raises(PeerLost, match="rank 0 died") as lost:
        check_call(8, 3, 4)
    assert lost.value.rank == 0
    return time.monotonic()


def test_a_rank_that_dies_before_others_open_its_memory(fresh_ranks):
    pool = fresh_ranks(3)
    dies = pool.start(opened_too_late, only=[0])
    job = pool.start(opened_too_late, only=[1, 2])
    job.hear("posted")
    killed = pool.kill(0)
    for heard in job.values():
        assert heard - killed < WITHIN
    assert dies.outcomes()[0].died


def test_a_rank_of_a_weft_group_that_dies_before_the_first_call(fresh_ranks):
    job = fresh_ranks(2).start(died_before_the_call)
    killed, died = job.outcomes()
    assert died.died
    assert killed.error is None, killed.trace
    assert killed.value < WITHIN


def died_before_the_call() -> float:
    """Seconds that a rank needs to name a peer whose group was made, and not used."""
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    dist.destroy_process_group()
    store = dist.PrefixStore("weft group", store)
    dist.init_process_group("weft", store=store, rank=rank, world_size=2)
    store.set(f"made {rank}", "")
    store.wait(["made 0", "made 1"])
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(PeerLost, match="rank 1 died") as lost:
        check_call(8, 3, 4)
    assert lost.value.rank == 1
    return time.monotonic() - began


STAGES = {
    "hello": (rendezvous, "exchange"),
    "cards": (opening, "exchange"),
    "opened": (opening, "exchange"),
    "doors": (several_machines, "exchange"),
    "connecting": (Door, "connect"),
    "connected": (several_machines, "exchange"),
}
"""Where ranks wait for each other in the first call: the name of the exchange, and who makes it."""


def gone_at(stage: str, ends: bool) -> str:
    """Rank 1 is gone when it comes to a stage of the first call: killed or interrupted."""
    if dist.get_rank() == 1:
        module, name = STAGES[stage]
        usual = getattr(module, name)

        def gone(*arguments):
            if stage not in ("connecting", arguments[2]):
                return usual(*arguments)
            if ends:
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyboardInterrupt

        setattr(module, name, gone)
        try:
            with pytest.raises(KeyboardInterrupt):
                check_call(8, 3, 4)
        finally:
            setattr(module, name, usual)
        return ""
    with pytest.raises(PeerLost) as lost:
        check_call(8, 3, 4)
    assert lost.value.rank == 1
    return str(lost.value)


def test_every_exchange_is_a_stage():
    """If the first call gets another exchange, ranks are to be killed there, too."""
    made = set()
    for module in {module for module, _ in STAGES.values()} - {Door}:
        with open(module.__file__) as file:
            source = file.read()
        made |= set(re.findall(r'(?:exchange|swap)\([^"]*"(\w+)"', source))
    assert made == set(STAGES) - {"connecting"}


@pytest.mark.parametrize("ends", [True, False], ids=["killed", "interrupted"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_is_gone_in_the_first_call(fresh_ranks, stage, ends):
    network = STAGES[stage][0] in (several_machines, Door)
    pool = fresh_ranks(2, WEFT_FABRIC="flat" if network else "auto")
    first, second = pool.start(gone_at, stage, ends).outcomes()
    assert first.error is None, first.trace
    assert first.at - second.at < WITHIN
    assert ("rank 1 died" if ends else "rank 1 was interrupted") in first.value
    if not ends:  # together they can open the group after all
        pool.run(check_call, 8, 3, 4)


def refused_when_all_is_connected() -> None:
    """Rank 1 has all connections and finds something wrong."""
    rank, made, connect = dist.get_rank(), [], Door.connect

    store = rendezvous.store_of(dist.group.WORLD)

    def connected(*arguments):
        made.extend(connect(*arguments))
        if rank == 1:
            store.wait(["rank 0 has them too"])
            raise Unsupported("finds something wrong")
        store.set("rank 0 has them too", "")
        return tuple(made)

    Door.connect = connected
    try:
        with pytest.raises(Unsupported, match="rank 1 finds something wrong"):
            check_call(8, 3, 4)
    finally:
        Door.connect = connect
    if rank == 0:
        wires, streams = made
        assert wires.read(1) == PEER_LOST
        with pytest.raises(Lost):
            streams.receive(1, memoryview(bytearray(1)), lambda: None)
    check_call(8, 3, 4)


def test_connections_are_closed_if_a_rank_is_refused(fresh_ranks):
    fresh_ranks(2, WEFT_FABRIC="flat").run(refused_when_all_is_connected)


def one_has_a_bad_link() -> float:
    """Rank 1 cannot open the group, and keeps its exception as a notebook does."""
    if dist.get_rank() == 1:
        os.environ["WEFT_LINK"] = "nonsense"
        with pytest.raises(Unsupported, match="is not a link") as kept:
            check_call(8, 3, 4)
        moment = time.monotonic()
        del os.environ["WEFT_LINK"]
        assert kept.tb is not None
    else:
        with pytest.raises(PeerLost, match="rank 1 gave up: 'nonsense' is not a link") as lost:
            check_call(8, 3, 4)
        moment = time.monotonic()
        assert lost.value.rank == 1
    check_call(8, 3, 4)  # together they can open the group after all
    return moment


@pytest.mark.parametrize("fabric", ["auto", "flat"])
def test_a_rank_with_a_bad_link_is_heard_of_at_once(fresh_ranks, fabric):
    first, second = fresh_ranks(2, WEFT_FABRIC=fabric).run(one_has_a_bad_link)
    assert first - second < WITHIN


def interrupted_with_the_number() -> str:
    """Rank 1 is interrupted as soon as it has the number of its attempt."""
    group, store = dist.group.WORLD, rendezvous.store_of(dist.group.WORLD)
    if dist.get_rank() == 1:

        class Interrupts:
            def __getattr__(self, name):
                return getattr(store, name)

            def add(self, key, by):
                number = store.add(key, by)
                if by:
                    raise KeyboardInterrupt
                return number

        usual, rendezvous.store_of = rendezvous.store_of, lambda group: Interrupts()
        try:
            with pytest.raises(KeyboardInterrupt):
                check_call(8, 3, 4)
        finally:
            rendezvous.store_of = usual
        assert group not in rendezvous._openings
    else:
        lost_at_once("rank 1 was interrupted by KeyboardInterrupt")
    dist.barrier()
    check_call(8, 3, 4)


def test_an_interrupt_with_the_number_of_an_attempt(fresh_ranks):
    fresh_ranks(2).run(interrupted_with_the_number)


def test_a_rank_that_is_only_late_is_waited_for(fresh_ranks):
    pool = fresh_ranks(2)
    job = pool.start(check_call, 8, 3, 4, only=[0])
    time.sleep(1.5)  # several looks after the one that is missing
    pool.start(check_call, 8, 3, 4, only=[1]).values()
    job.values()


def gave_up_because_of_another() -> None:
    """Rank 0 has given up because of rank 2, which is not missing where rank 1 waits."""
    group = dist.group.WORLD
    with pytest.raises(PeerLost) as lost:
        give_up_or_wait(group)
    assert lost.value.rank == (0 if dist.get_rank() == 2 else 2)
    dist.barrier()


def give_up_or_wait(group) -> None:
    with rendezvous.opening(group):
        if dist.get_rank() == 0:
            raise PeerLost("rank 2 died", 2)
        while True:
            rendezvous.look_after(group, [0])


def test_the_cause_is_named_and_not_who_gave_up_because_of_it(fresh_ranks):
    fresh_ranks(3).run(gave_up_because_of_another)


def came_and_gave_up() -> None:
    """Rank 0 looks after rank 1 just when that comes, and then gives up because of its card."""
    group, usual = dist.group.WORLD, rendezvous.look_after
    with rendezvous.opening(group):
        if dist.get_rank() == 1:
            store = rendezvous.store_of(group)
            store.wait(["rank 0 looks"])
            found = rendezvous.exchange(group, range(2), "test", {"number": 1}, 20.0)
            store.set(rendezvous._note(rendezvous.number_of(group), 1), json.dumps(["gave up", 1]))
            store.set("rank 1 gave up", "")
        else:

            def late(group, missing):
                store = rendezvous.store_of(group)
                store.set("rank 0 looks", "")
                store.wait(["rank 1 gave up"])
                usual(group, missing)

            rendezvous.look_after = late
            try:
                found = rendezvous.exchange(group, range(2), "test", {"number": 0}, 20.0)
            finally:
                rendezvous.look_after = usual
    assert found == [{"number": 0}, {"number": 1}]


def test_a_rank_that_came_is_heard_even_if_it_gave_up_since(fresh_ranks):
    fresh_ranks(2).run(came_and_gave_up)
