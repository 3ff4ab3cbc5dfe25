"""Every transport passes the conformance table over gloo, and `grouped` finds calls that do not match."""

import pytest
import torch
import torch.distributed as dist

from specsync_core import local_wire
from specsync_core.errors import PayloadError, TransportError
from specsync_core.groups import TorchGroup
from specsync_core.local_wire import LocalWire, wire_of
from specsync_core.payload import Packet, describe
from specsync_core.testing import run_ranks
from specsync_core.transports import choose_transport
from specsync_core.transports.choose import TRANSPORTS
from specsync_core.transports.framed import HEADER_BYTES, FramedTransport
from tests.transport_conformance import conform

CPU = torch.device("cpu")
HOST = {name: build for name, build in TRANSPORTS.items() if name != "one-shot"}
"""The transports that work on host memory."""
NO_GPU = ("one-shot", "every rank: it needs CUDA tensors")


def conformance(rank: int, world_size: int) -> dict[str, list[str]]:
    failures = {name: conform(build, TorchGroup(), CPU) for name, build in HOST.items()}
    # A sub-group whose first member is not global rank 0: its rank 0 is global rank 1.
    ranks = list(range(1, world_size))
    subgroup = dist.new_group(ranks)
    if rank in ranks:
        failures |= {
            f"{name} in a sub-group": conform(build, TorchGroup(subgroup), CPU) for name, build in HOST.items()
        }
    return failures


def test_every_transport_conforms_on_three_ranks_and_in_a_subgroup():
    for rank, failures in enumerate(run_ranks(conformance, 3)):
        assert not any(failures.values()), f"rank {rank}: {failures}"
        assert len(failures) == (2 if rank == 0 else 4)


def triple(rank: int) -> tuple[torch.Tensor, ...]:
    return torch.arange(8) + rank, torch.arange(8) * rank, (torch.arange(8) + rank) % 2 == 0


def count_broadcasts(rank: int, world_size: int, wired: bool) -> dict[str, int]:
    """Over the sockets of one machine, or by the group's own broadcast."""
    counts, made = {}, []
    if not wired:
        local_wire._place = lambda: f"machine {rank}"
    for kind in (LocalWire, TorchGroup):
        original = kind.broadcast
        kind.broadcast = lambda *args, original=original, **kwargs: (made.append(1), original(*args, **kwargs))[1]
    for name, build in HOST.items():
        made.clear()
        transport, tensors = build(TorchGroup()), triple(rank)
        packet = Packet("counted", describe(tensors), 0)
        transport.prepare(packet, tensors)
        transport.overwrite_(packet, tensors)
        counts[name] = len(made)
    return counts


@pytest.mark.parametrize("wired", [True, False])
def test_three_tensors_are_one_collective_grouped_and_three_otherwise(wired):
    assert run_ranks(count_broadcasts, 2, args=(wired,)) == [{"grouped": 1, "group": 3}] * 2


def mismatched_call(rank: int, world_size: int, sizes: tuple[int, int], names: tuple[str, str]) -> str:
    transport = TRANSPORTS["grouped"](TorchGroup())
    tensors = (torch.arange(sizes[rank]) + rank,)
    packet = Packet(names[rank], describe(tensors), 0)
    transport.prepare(packet, tensors)
    try:
        transport.overwrite_(packet, tensors)
    except PayloadError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("sizes", "names", "message"),
    [
        (
            (8, 7),
            ("plan", "plan"),
            "group rank 0 is at call 1 of plan with int64[8], group rank 1 at call 1 of plan with int64[7]",
        ),
        (
            (7, 8),
            ("plan", "plan"),
            "group rank 0 is at call 1 of plan with int64[7], group rank 1 at call 1 of plan with int64[8]",
        ),
        (
            (8, 8),
            ("plan", "draft"),
            "group rank 0 is at call 1 of plan with int64[8], group rank 1 at call 1 of draft with int64[8]",
        ),
    ],
)
def test_grouped_finds_calls_that_do_not_match(sizes, names, message):
    root, peer = run_ranks(mismatched_call, 2, args=(sizes, names))
    assert root == "nothing"
    assert message in peer


def cut_label(rank: int, world_size: int, last: int, wired: bool) -> str:
    """Sixty tensors: what describes them does not fit into the header."""
    if not wired:
        local_wire._place = lambda: f"machine {rank}"
    sizes = [3] * 59 + [last if rank else 4]
    tensors = tuple(torch.full((size,), rank + 1) for size in sizes)
    packet = Packet("cut", describe(tensors), 0)
    assert len(packet.label) > HEADER_BYTES
    transport = FramedTransport(TorchGroup())
    transport.prepare(packet, tensors)
    try:
        transport.overwrite_(packet, tensors)
    except PayloadError as error:
        return str(error)
    return "1" if all(bool((tensor == 1).all()) for tensor in tensors) else "not rank 0's values"


@pytest.mark.parametrize(("last", "found"), [(4, "1"), (3000, "the ranks' calls do not match")])
def test_payloads_whose_description_is_cut_off_are_still_compared_by_size(last, found):
    _, peer = run_ranks(cut_label, 2, 50, (last, True))
    assert found in peer
    if last == 4:
        assert run_ranks(cut_label, 2, 50, (last, False)) == ["1", "1"]


def skipped_call(rank: int, world_size: int) -> str:
    transport = TRANSPORTS["grouped"](TorchGroup())
    tensors = (torch.arange(4) + rank,)
    packet = Packet("plan", describe(tensors), 0)
    transport.prepare(packet, tensors)
    if rank == 0:
        transport.overwrite_(packet, tensors)
    else:  # what took the message was no call of this site
        wire_of(dist.group.WORLD).broadcast(memoryview(bytearray(512)))
    try:
        transport.overwrite_(packet, tensors)
    except PayloadError as error:
        return str(error)
    return "nothing"


def test_grouped_finds_a_rank_that_is_a_call_behind():
    assert "group rank 0 is at call 2 of plan with int64[4], group rank 1 at call 1" in run_ranks(skipped_call, 2)[1]


class WrongOnPeers:
    name = "grouped"

    def __init__(self, group):
        self._rank = group.rank_in_group

    def prepare(self, packet, tensors):
        pass

    def overwrite_(self, packet, tensors):
        if self._rank == 1:
            raise RuntimeError("no peer access on this rank")


def choose(rank: int, world_size: int, broken: tuple[str, ...]) -> tuple[str, tuple[tuple[str, str], ...]]:
    from specsync_core.collectives import store_of
    from specsync_core.transports import choose as module

    for name in broken:
        module.TRANSPORTS[name] = WrongOnPeers
    store = store_of(dist.group.WORLD)
    try:
        choice = choose_transport("auto", TorchGroup(), lambda topic, payload: store.exchange(topic, payload, 10))
    except TransportError as error:
        return str(error), ()
    return choice.transport.name, choice.rejected


def test_auto_takes_grouped_on_host_tensors_and_says_why_not_one_shot():
    assert run_ranks(choose, 2, args=((),)) == [("grouped", (NO_GPU,))] * 2


def test_auto_falls_back_on_every_rank_when_one_rank_fails_and_says_why():
    taken = run_ranks(choose, 2, args=(("grouped",),))
    assert [name for name, _ in taken] == ["group", "group"]
    for _, (no_gpu, (name, why)) in taken:
        assert no_gpu == NO_GPU
        assert name == "grouped"
        assert why.endswith("group rank 1: no peer access on this rank")


def test_auto_raises_on_every_rank_when_nothing_works():
    for message, _ in run_ranks(choose, 2, args=(("grouped", "group"),)):
        assert message.startswith(
            "no transport passes its self-test: one-shot: every rank: it needs CUDA tensors; grouped:"
        )
        assert "group rank 1: no peer access on this rank" in message
