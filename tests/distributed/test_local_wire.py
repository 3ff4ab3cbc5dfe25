"""Sockets between the ranks of one machine: bytes arrive, calls that do not match are found, lost peers are named."""

import os
import signal
import socket
import time

import pytest
import torch
import torch.distributed as dist

from specsync_core import local_wire
from specsync_core.collectives import store_of
from specsync_core.errors import SpecSyncError, TransportError
from specsync_core.groups import TorchGroup
from specsync_core.local_wire import HELLO, wire_of
from specsync_core.testing import run_ranks
from tests.distributed.test_rank_failures import planned_sync

SIZES = (0, 1, 300, 100_000, 3_000_000)


def carry(rank: int, world_size: int) -> list[object]:
    wire = wire_of(dist.group.WORLD)
    assert wire is wire_of(dist.group.WORLD)
    found: list[object] = []
    for size in SIZES:
        own = bytearray([rank + 1]) * size
        found.append((wire.broadcast(memoryview(own)), own == bytes([1]) * size))
        found.append(
            [
                part == bytes([peer + 1]) * size
                for peer, part in enumerate(wire.gather(bytes([rank + 1]) * size, "test"))
            ]
        )
        own[:] = bytes([rank + 1]) * size
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_bytes_of_every_size_arrive_on_every_rank(world):
    for rank, found in enumerate(run_ranks(carry, world)):
        for size, cast, gathered in zip(SIZES, found[::2], found[1::2], strict=True):
            assert cast == (size, True), (rank, size)
            assert gathered == [True] * world, (rank, size)


def shorter_and_longer(rank: int, world_size: int) -> list[object]:
    """Rank 0's message has another size than what the others hold: nothing is mixed up behind it."""
    wire = wire_of(dist.group.WORLD)
    found = []
    for size in ((5, 8), (8, 5)):
        own = bytearray([rank + 1]) * size[min(rank, 1)]
        found.append((wire.broadcast(memoryview(own)), bytes(own)))
    return [*found, wire.gather(bytes([rank + 7]), "test")]


def test_messages_of_other_sizes_leave_the_stream_whole():
    root, *peers = run_ranks(shorter_and_longer, 3)
    assert root == [(5, b"\1" * 5), (8, b"\1" * 8), [b"\7", b"\10", b"\11"]]
    for rank, peer in enumerate(peers, 1):
        kept = bytes([rank + 1]) * 3
        assert peer == [(5, b"\1" * 5 + kept), (8, b"\1" * 5), [b"\7", b"\10", b"\11"]]


def mixed(rank: int, world_size: int, case: str) -> tuple[str, str, float]:
    """One rank syncs where the other agrees, or brings another number of bytes."""
    wire = wire_of(dist.group.WORLD)
    started = time.monotonic()
    try:
        if case == "sizes":
            wire.gather(b"x" * (rank + 1), "agreement")
        elif rank == 1:
            wire.gather(b"x", "agreement")
        else:
            wire.broadcast(memoryview(bytearray(8)))
            wire.broadcast(memoryview(bytearray(8)))
    except SpecSyncError as error:
        store_of(dist.group.WORLD).fail(error)
        return type(error).__name__, str(error), time.monotonic() - started
    return "nothing", "", 0.0


@pytest.mark.parametrize("case", ["calls", "sizes"])
def test_calls_that_do_not_match_are_found_on_both_sides_long_before_the_time_out(case):
    found = run_ranks(mixed, 2, args=(case,), group_timeout_s=60)
    assert [kind for kind, _, _ in found] == [{"calls": "TransportError", "sizes": "PayloadError"}[case]] * 2
    assert all(took_s < 10 for *_, took_s in found)
    said = " ".join(text for _, text, _ in found)
    assert {"calls": "in a broadcast", "sizes": "group rank 1 brings 2 bytes"}[case] in said


def sync_against_agree(rank: int, world_size: int) -> tuple[str, float]:
    """The same through the public calls."""
    sync = planned_sync()
    tokens = torch.zeros(4, dtype=torch.int64)
    sync.sync("dspark-target", tokens)
    sync.agree("dspark-mem", 1.0, "min")
    started = time.monotonic()
    try:
        if rank == 0:
            sync.sync("dspark-target", tokens)
        sync.agree("dspark-mem", 1.0, "min")
    except SpecSyncError as error:
        return str(error), time.monotonic() - started
    return "nothing", 0.0


def test_a_sync_on_one_rank_and_an_agreement_on_the_other_are_told_apart_at_once():
    for told, took_s in run_ranks(sync_against_agree, 2, group_timeout_s=60):
        assert "the ranks' calls do not match" in told
        assert "in an agreement" in told
        assert "of a broadcast" in told or "in a broadcast" in told
        assert took_s < 10


def end_in_a_call(rank: int, world_size: int, how: str) -> tuple[str, float]:
    wire = wire_of(dist.group.WORLD)
    time.sleep(1.0)
    started = time.monotonic()
    if rank == 1:
        os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[how])
    try:
        for _ in range(3):
            wire.broadcast(memoryview(bytearray(8)))
    except TransportError as error:
        again = "nothing"
        try:
            wire.broadcast(memoryview(bytearray(8)))
        except TransportError as refused:
            again = str(refused)
        assert "earlier call" in again
        return str(error), time.monotonic() - started
    return "nothing", 0.0


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_peer_that_is_gone_is_named(how):
    (told, took_s), lost = run_ranks(end_in_a_call, 2, 60, (how,), group_timeout_s=4, lost={1})
    assert lost is None
    assert "roup rank 1 (pid " in told, told
    assert {"killed": "has ended", "stopped": "is stopped (SIGSTOP)"}[how] in told
    assert took_s < {"killed": 3, "stopped": 9}[how]


def open_elsewhere(rank: int, world_size: int, case: str) -> tuple[bool, list[int]]:
    """A group whose ranks cannot all be reached has no wire, on any rank, and agrees over gloo."""
    if case == "other machine":
        local_wire._place = lambda: f"machine {rank}"
    elif rank == 1:
        local_wire.HELLO = type("Refused", (), {"pack": staticmethod(refuse)})
    sync = planned_sync()
    own = torch.tensor([rank + 3])
    sync.sync("dspark-target", own)
    return wire_of(TorchGroup().cpu_group) is None, [*own.tolist(), sync.agree("dspark-mem", rank + 1, "max")]


def refuse(*args: object) -> bytes:
    raise ConnectionRefusedError(111, "Connection refused")


@pytest.mark.parametrize("case", ["other machine", "no connection"])
def test_where_it_cannot_be_opened_every_rank_goes_over_gloo(case):
    assert run_ranks(open_elsewhere, 3, 60, (case,)) == [(True, [3, 3])] * 3


def test_strangers_are_turned_away():
    listener, offer = local_wire._listen()
    address = f"\0{offer['address']}"
    ends = []
    for hello in (b"", b"x" * HELLO.size, HELLO.pack(b"0" * 32, 1), HELLO.pack(offer["secret"].encode(), 1)):
        ends.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        ends[-1].connect(address)
        ends[-1].sendall(hello)
    ends[0].shutdown(socket.SHUT_WR)
    found = local_wire._accept(listener, offer["secret"], 2, 10.0)
    assert list(found) == [1]
    for end in ends[:3]:
        end.settimeout(1)
        assert end.recv(1) == b"", "a stranger's connection stays open"
    found[1].sendall(b"y")
    assert ends[3].recv(1) == b"y"
    for each in (*ends, *found.values(), listener):
        each.close()
