"""Sockets between the ranks of one machine: bytes arrive, calls that do not match are found, lost peers are named."""

import logging
import os
import re
import signal
import socket
import threading
import time
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist

from specsync_core import group_store, local_wire
from specsync_core.collectives import store_of
from specsync_core.errors import SpecSyncError, TransportError
from specsync_core.groups import TorchGroup
from specsync_core.local_wire import HELLO, LocalWire, wire_of
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


def sync_against_agree(rank: int, world_size: int, syncing: int) -> tuple[str, float]:
    """The same through the public calls."""
    sync = planned_sync()
    tokens = torch.zeros(4, dtype=torch.int64)
    sync.sync("dspark-target", tokens)
    sync.agree("dspark-mem", 1.0, "min")
    started = time.monotonic()
    try:
        if rank == syncing:
            sync.sync("dspark-target", tokens)
        sync.agree("dspark-mem", 1.0, "min")
    except SpecSyncError as error:
        return str(error), time.monotonic() - started
    return "nothing", 0.0


@pytest.mark.parametrize(("world", "syncing"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
def test_a_sync_on_one_rank_and_an_agreement_on_the_others_are_told_apart_at_once(world, syncing):
    for told, took_s in run_ranks(sync_against_agree, world, args=(syncing,), group_timeout_s=60):
        assert "the ranks' calls do not match" in told
        assert "in an agreement" in told
        assert "of a broadcast" in told or "in a broadcast" in told
        assert took_s < 10


def interrupted(rank: int, world_size: int, wired: bool, act: str) -> tuple[str, float]:
    """Ctrl-C reaches one rank while it waits in a call."""
    if not wired:
        local_wire._place = lambda: f"machine {rank}"
    sync = planned_sync()
    tokens = torch.zeros(4, dtype=torch.int64)
    sync.sync("dspark-target", tokens)
    dist.barrier()
    started = time.monotonic()
    if rank == 1:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.7)
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    try:
        if rank == 0:  # the one that the other waits for: it comes after the interrupt
            time.sleep(1.5)
        if act == "sync":
            sync.sync("dspark-target", tokens)
            sync.sync("dspark-target", tokens)
        sync.agree("dspark-mem", 1.0, "min")
    except (SpecSyncError, KeyboardInterrupt) as error:
        time.sleep(1.0)  # the reason has to leave before the process does
        return f"{type(error).__name__}: {error}", time.monotonic() - started
    return "nothing", 0.0


@pytest.mark.parametrize("act", ["sync", "agree"])
@pytest.mark.parametrize("wired", [True, False], ids=["sockets", "gloo"])
def test_an_interrupt_on_one_rank_reaches_the_others(wired, act):
    found = run_ranks(interrupted, 3, 50, (wired, act), group_timeout_s=40)
    assert found[1][0].startswith("KeyboardInterrupt")
    for told, took_s in (found[0], found[2]):
        assert "group rank 1 gave up" in told, found
        assert "KeyboardInterrupt" in told, found
        assert took_s < 12


def give_up_elsewhere(rank: int, world_size: int) -> tuple[str, float]:
    """Rank 1 gives up before it takes the broadcast; rank 0 must not go on into what the two do together next."""
    wire = wire_of(dist.group.WORLD)
    wire.broadcast(memoryview(bytearray(8)))
    if rank == 1:
        store_of(dist.group.WORLD).fail(TransportError("the hook raised"))
        time.sleep(3.0)  # alive, and in no call
        return "", 0.0
    started = time.monotonic()
    try:
        wire.broadcast(memoryview(bytearray(8)))
    except TransportError as error:
        return str(error), time.monotonic() - started
    return "nothing", 0.0


def test_group_rank_0_learns_in_the_same_call_that_a_peer_has_given_up():
    (told, took_s), _ = run_ranks(give_up_elsewhere, 2, 50, group_timeout_s=40)
    assert "the hook raised" in told
    assert took_s < 3


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


class LetsGoOn(logging.Handler):
    """Sends SIGCONT to the process that a warning names as stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())
        if found := re.search(r"`kill -CONT (\d+)`", self.said[-1]):
            os.kill(int(found[1]), signal.SIGCONT)


def stop_for_a_while(rank: int, world_size: int) -> tuple[list[str], list[int], int]:
    group_store.STOPPED_S = 0.5
    logging.getLogger("specsync").addHandler(handler := LetsGoOn())
    wire = wire_of(dist.group.WORLD)
    store_of(dist.group.WORLD).place = "call 7 of toy-gate"
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    data = bytearray([rank] * 4)
    wire.broadcast(memoryview(data))
    time.sleep(1.5)  # said once
    return handler.said, list(data), pids[1]


def test_a_stopped_peer_is_named_in_the_log_long_before_the_time_out():
    """SGLang's CPU group waits two hours."""
    (said, _, pid), (_, data, _) = run_ranks(stop_for_a_while, 2, 60, group_timeout_s=600)
    assert data == [0, 0, 0, 0]
    (line,) = said
    assert line.startswith(f"group rank 1 (pid {pid} on "), line
    assert ") is stopped (SIGSTOP); group rank 0 waits in broadcast of call 7 of toy-gate for " in line
    assert line.endswith(f"s. `kill -CONT {pid}` lets it go on.")


def open_elsewhere(rank: int, world_size: int, case: str) -> tuple[bool, list[int]]:
    """A group whose ranks cannot all be reached has no wire, on any rank, and agrees over gloo."""
    if case == "other machine":
        local_wire._place = lambda: f"machine {rank}"
    elif case == "no sockets":
        if rank == 0:
            local_wire.socket.socket = forbid
    elif rank == 1:
        local_wire.HELLO = type("Refused", (), {"pack": staticmethod(refuse)})
    sync = planned_sync()
    own = torch.tensor([rank + 3])
    sync.sync("dspark-target", own)
    return wire_of(TorchGroup().cpu_group) is None, [*own.tolist(), sync.agree("dspark-mem", rank + 1, "max")]


def forbid(*args: object) -> socket.socket:
    raise PermissionError(1, "Operation not permitted")


def refuse(*args: object) -> bytes:
    raise ConnectionRefusedError(111, "Connection refused")


@pytest.mark.parametrize("case", ["other machine", "no connection", "no sockets"])
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


def test_a_silent_stranger_does_not_hold_the_opening_up():
    listener, offer = local_wire._listen()
    silent, peer = (socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(2))
    for end in (silent, peer):
        end.connect(f"\0{offer['address']}")
    peer.sendall(HELLO.pack(offer["secret"].encode(), 1))
    started = time.monotonic()
    found = local_wire._accept(listener, offer["secret"], 2, 30.0)
    assert (list(found), time.monotonic() - started < 10) == ([1], True)
    for each in (silent, peer, *found.values(), listener):
        each.close()


def test_another_users_connection_is_closed_before_it_says_a_word(monkeypatch):
    listener, offer = local_wire._listen()
    users = iter([os.geteuid() + 1, os.geteuid()])
    monkeypatch.setattr(local_wire, "peer_of", lambda _: (1, next(users)))
    stranger, peer = (socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(2))
    for end in (stranger, peer):  # both know the secret
        end.connect(f"\0{offer['address']}")
        end.sendall(HELLO.pack(offer["secret"].encode(), 1))
    found = local_wire._accept(listener, offer["secret"], 2, 10.0)
    with pytest.raises(ConnectionResetError):
        stranger.recv(1)
    for each in (stranger, peer, *found.values(), listener):
        each.close()


class Store:
    """As much of a `GroupStore` as a wire uses."""

    rank, world_size = 0, 5

    def enter(self, what: str) -> None: ...

    def leave(self) -> None: ...

    def glance(self) -> None: ...

    def abandon(self, what: str, error: BaseException) -> None: ...

    def give_up(self, what: str, why: str) -> None:
        raise TransportError(f"{what}: {why}")


def test_a_calls_bound_is_one_for_all_of_its_peers():
    """Each peer comes within the bound after the one before it, and the call still ends in time."""
    pairs = {rank: socket.socketpair() for rank in range(1, Store.world_size)}
    wire = LocalWire(Store(), {rank: ends[0] for rank, ends in pairs.items()}, timeout_s=2.0)

    def come_late() -> None:
        for _, end in pairs.values():
            time.sleep(1.2)
            with suppress(OSError):
                end.sendall(local_wire.HEAD.pack(local_wire.GIVE, 1, 1) + b"x")

    peers = threading.Thread(target=come_late)
    peers.start()
    started = time.monotonic()
    with pytest.raises(TransportError, match=r"no word from group rank 2 within 2 s"):
        wire.gather(b"x", "test")
    assert time.monotonic() - started < 4
    wire.close()
    peers.join()
    for _, end in pairs.values():
        end.close()


def open_on_two_threads(rank: int, world_size: int) -> tuple[bool, list[bytes]]:
    """Both threads make the group's first call; they get one wire."""
    found: list[object] = []
    both = threading.Barrier(2)

    def first() -> None:
        both.wait()
        found.append(wire_of(dist.group.WORLD))

    threads = [threading.Thread(target=first) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found[0] is found[1] is not None, found[0].gather(bytes([rank]), "test")


def test_two_threads_that_both_make_the_first_call_get_one_wire():
    assert run_ranks(open_on_two_threads, 2, 50) == [(True, [b"\0", b"\1"])] * 2
