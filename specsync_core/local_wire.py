"""Sockets between the ranks of one machine: host bytes in 10 us, where a gloo broadcast takes 190 (two CPU ranks).

Each peer of a group has one stream socket to group rank 0, through which all of the group's host traffic goes in the
order of the calls. Every message says what it is and how long, so calls that do not match are found instead of
mixed up. Group rank 0 waits until every peer has taken a broadcast: one that gave up before it, has ended or is stopped
is known on every rank before any goes on into the engine's own collectives. Linux only (abstract addresses).
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from specsync_core.errors import PayloadError, TransportError
from specsync_core.group_store import GroupStore, store_of
from specsync_core.liveness import own_identity, peer_of

logger = logging.getLogger("specsync")

SLICE_S = 0.25
"""How often a wait looks for peers that have given up."""
SPIN_S = 1e-3
"""How long a wait looks again and again before it sleeps: a peer is close behind as a rule, and who sleeps is woken
late, on a busy core only when the others' time is over. Only where the ranks have a core each."""
SLICE = struct.pack("ll", 0, int(SLICE_S * 1e6))
OPEN_S = 10.0
"""How long connecting may take, once all ranks have met."""
HEAD = struct.Struct("<4sIQ")
"""Of a message: its kind, the number of the call, the bytes that follow."""
CAST, ACK, ASK, GIVE, ALL = b"cast", b"ack ", b"ask ", b"give", b"all "
KINDS = {CAST: "a broadcast", ACK: "the end of a broadcast"} | dict.fromkeys((ASK, GIVE, ALL), "an agreement")
HELLO = struct.Struct("<32sI")
"""A peer's first bytes: the secret, and its group rank."""


class _Line:
    """One end of the socket between group rank 0 and one peer."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        """The group rank at the other end."""
        self.connection = connection
        self.head = memoryview(bytearray(HEAD.size))
        connection.settimeout(None)  # Python would ask the system first whether it has to wait, in every call
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, SLICE)


class LocalWire:
    """What carries host bytes between the ranks of one group on one machine. Obtain it with `wire_of`.

    Args:
        store: the group's.
        connections: by group rank: on group rank 0 one for each peer, elsewhere the one to group rank 0.
        timeout_s: how long a call waits for a peer.
        spin_s: how long a wait looks for the peer's words before it sleeps.
    """

    def __init__(
        self, store: GroupStore, connections: dict[int, socket.socket], timeout_s: float, spin_s: float = 0.0
    ) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._lines = [_Line(rank, connection) for rank, connection in sorted(connections.items())]
        self._calls = 0
        self._broken = False
        self._spin_s = spin_s
        self._slices = 0
        """Of waiting, in the call that is under way."""
        self._lock = threading.Lock()

    def broadcast(self, view: memoryview) -> int:
        """Bring group rank 0's bytes to every rank; return how many came, which is ``len(view)`` where calls match.

        Bytes beyond ``view`` are dropped, and of a shorter message only as much of ``view`` is written.

        Raises:
            TransportError: a peer ended, gave up, did not come in time, or is in another call.
        """
        with self._lock:
            return int(self._act("broadcast", self._cast if self._store.rank == 0 else self._take, view))

    def gather(self, data: bytes, what: str) -> list[bytes]:
        """Return every rank's bytes, by group rank. All ranks bring equally many.

        Raises:
            TransportError: as `broadcast`.
            PayloadError: a rank brings another number of bytes.
        """
        with self._lock:
            joined = self._act(what, self._collect if self._store.rank == 0 else self._give, data)
        size = len(data)
        return [joined[rank * size : (rank + 1) * size] for rank in range(self._store.world_size)]

    def close(self) -> None:
        """Close this rank's ends; a peer that waits is told."""
        for line in self._lines:
            line.connection.close()

    def __del__(self) -> None:
        self.close()

    def _act(self, what: str, act: Any, payload: Any) -> Any:
        if self._broken:
            raise TransportError(f"{what}: an earlier call on this group's sockets failed; end the group's processes.")
        self._calls = (self._calls + 1) & 0xFFFFFFFF
        self._slices = 0
        self._broken = True  # until it has ended well: whatever interrupts a message leaves half of it behind
        self._store.enter(what)
        try:
            found = act(payload, what)
        except BaseException as error:
            self._store.abandon(what, error)
            raise
        finally:
            self._store.leave()
        self._broken = False
        return found

    # --- the four acts ----------------------------------------------------------------------------

    def _cast(self, view: memoryview, what: str) -> int:
        for line in self._lines:
            self._send(line, CAST, view, what)
        for line in self._lines:
            self._expect(line, ACK, what)
        return len(view)

    def _take(self, view: memoryview, what: str) -> int:
        (line,) = self._lines
        size = self._expect(line, CAST, what)
        self._receive(line, view[:size], what)
        if size > len(view):
            self._receive(line, memoryview(bytearray(size - len(view))), what)
        self._send(line, ACK, b"", what)
        return size

    def _give(self, data: bytes, what: str) -> bytes:
        (line,) = self._lines
        self._send(line, GIVE, data, what)
        self._expect(line, ASK, what)
        joined = bytearray(self._expect(line, ALL, what))
        self._receive(line, memoryview(joined), what)
        return bytes(joined)

    def _collect(self, data: bytes, what: str) -> bytes:
        parts = [data]
        for line in self._lines:
            self._send(line, ASK, b"", what)  # tells a peer that awaits a broadcast that this is none
        for line in self._lines:
            size = self._expect(line, GIVE, what)
            if size != len(data):
                raise PayloadError(f"{what}: group rank {line.rank} brings {size} bytes, group rank 0 {len(data)}.")
            part = bytearray(size)
            self._receive(line, memoryview(part), what)
            parts.append(bytes(part))
        joined = b"".join(parts)
        for line in self._lines:
            self._send(line, ALL, joined, what)
        return joined

    # --- messages ---------------------------------------------------------------------------------

    def _expect(self, line: _Line, kind: bytes, what: str) -> int:
        """Read the head of a message, which must be of this kind and call; return the bytes that follow."""
        self._receive(line, line.head, what)
        theirs, call, size = HEAD.unpack(line.head)
        if theirs == kind and call == self._calls:
            return int(size)
        raise TransportError(
            f"{what}: the ranks' calls do not match: group rank {self._store.rank} is at call {self._calls} of its"
            f" group, in {KINDS[kind]}, and group rank {line.rank} at call {call}, in {KINDS.get(theirs, 'no call')}."
            " A rank skipped a call, or syncs where the other agrees: compare what the two ranks decided before."
        )

    def _send(self, line: _Line, kind: bytes, payload: memoryview | bytes, what: str) -> None:
        left = memoryview(payload)
        head = HEAD.pack(kind, self._calls, len(left))
        while True:
            try:
                sent = line.connection.sendmsg((head, left)) if head else line.connection.send(left)
            except BlockingIOError:
                self._go_on(line, what)
                continue
            except OSError as error:
                self._lose(line, error, what)
            head, rest = head[sent:], max(0, sent - len(head))
            left = left[rest:]
            if not head and not left:
                return

    def _receive(self, line: _Line, view: memoryview, what: str) -> None:
        spin_until = time.perf_counter() + self._spin_s if self._spin_s else 0.0
        while view:
            try:
                got = line.connection.recv_into(view, 0, socket.MSG_DONTWAIT if spin_until else 0)
            except BlockingIOError:
                if not spin_until:
                    self._go_on(line, what)
                elif time.perf_counter() > spin_until:
                    spin_until = 0.0
                else:
                    os.sched_yield()
                continue
            except OSError as error:
                self._lose(line, error, what)
            if not got:
                self._lose(line, None, what)
            view = view[got:]

    def _go_on(self, line: _Line, what: str) -> None:
        """One slice of a wait is over: raise when a peer has given up, or when it was the last."""
        self._store.glance()
        self._slices += 1
        if self._slices * SLICE_S >= self._timeout_s:
            self._store.give_up(what, f"no word from group rank {line.rank} within {self._timeout_s:g} s")

    def _lose(self, line: _Line, error: OSError | None, what: str) -> NoReturn:
        time.sleep(0.05)  # a peer that gave up says why before it ends
        said = f" ({error.strerror})" if error is not None else ""
        self._store.give_up(what, f"group rank {line.rank} has closed its socket{said}")


_wires: WeakKeyDictionary[Any, LocalWire | None] = WeakKeyDictionary()


def wire_of(cpu_group: Any) -> LocalWire | None:
    """Return this process's `LocalWire` for a gloo group; None where its ranks are not of one machine.

    The first call opens it, on every rank of the group together.

    Raises:
        TransportError: a rank did not come to the opening.
    """
    if not isinstance(cpu_group, dist.ProcessGroup) or dist.get_world_size(cpu_group) == 1:
        return None
    if cpu_group not in _wires:
        store = store_of(cpu_group)
        with store.opening:
            if cpu_group not in _wires:
                _wires[cpu_group] = _open(store, timeout_of(cpu_group))
    return _wires[cpu_group]


def timeout_of(cpu_group: dist.ProcessGroup) -> float:
    """How long the collectives of a gloo group wait, in seconds."""
    with suppress(AttributeError, RuntimeError):
        options = cpu_group._get_backend(torch.device("cpu")).options
        return float(options._timeout.total_seconds())
    return dist.constants.default_pg_timeout.total_seconds()


def _open(store: GroupStore, timeout_s: float) -> LocalWire | None:
    """Connect all ranks, or none."""
    listener, offer = _listen() if store.rank == 0 else (None, {})
    try:
        offers = store.exchange("sockets", {"place": _place(), "cores": _cores(), **offer}, timeout_s)
        connections, finding = _connect(store, listener, offers, min(OPEN_S, timeout_s / 2))
    finally:
        if listener is not None:
            listener.close()
    findings = store.exchange("sockets are open", finding, timeout_s)
    if (found := next((each for each in findings if each is not None), None)) is not None:
        for connection in connections.values():
            connection.close()
        if store.rank == 0:
            logger.info("host tensors and agreements travel over gloo: %s", found)
        return None
    cores = {core for each in offers for core in each["cores"]}
    return LocalWire(store, connections, timeout_s, SPIN_S if len(cores) >= store.world_size else 0.0)


def _place() -> str | None:
    """Where such sockets and process ids mean the same: this machine, its pid and its network namespace."""
    place = own_identity()["place"]
    with suppress(OSError):
        return place and f"{place} {os.readlink('/proc/self/ns/net')}"
    return None


def _cores() -> list[int]:
    """The processor cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if sys.platform.startswith("linux") else []


def _listen() -> tuple[socket.socket | None, dict[str, str]]:
    """Group rank 0's socket, and what peers need to reach it; nothing where such sockets do not exist."""
    if not sys.platform.startswith("linux"):
        return None, {}
    address = f"specsync-{secrets.token_hex(16)}"
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"\0{address}")
        listener.listen(128)
    except OSError as error:  # a sandbox forbids it, or no file descriptor is left: the peers must hear so
        return None, {"refused": str(error.strerror or error)}
    return listener, {"address": address, "secret": secrets.token_hex(16)}


def _connect(
    store: GroupStore, listener: socket.socket | None, offers: list[dict[str, Any]], limit_s: float
) -> tuple[dict[int, socket.socket], str | None]:
    """This rank's connections, and what went wrong."""
    away = [rank for rank, offer in enumerate(offers) if offer["place"] != offers[0]["place"] or not offer["place"]]
    if away:
        return {}, f"group rank {', '.join(map(str, away))} not on the machine, or in the container, of group rank 0"
    if "address" not in offers[0]:
        return {}, offers[0].get("refused", "sockets of the kind needed exist on Linux only")
    try:
        if listener is not None:
            return _accept(listener, offers[0]["secret"], store.world_size, limit_s), None
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(limit_s)
        connection.connect(f"\0{offers[0]['address']}")
        connection.sendall(HELLO.pack(offers[0]["secret"].encode(), store.rank))
        return {0: connection}, None
    except OSError as error:
        return {}, f"group rank {store.rank}: {error.strerror or error}"


def _accept(listener: socket.socket, secret: str, world_size: int, limit_s: float) -> dict[int, socket.socket]:
    """One connection from each peer: of this user, and knowing the secret. Others are closed."""
    deadline = time.monotonic() + limit_s
    found: dict[int, socket.socket] = {}
    while len(found) < world_size - 1:
        if (left_s := deadline - time.monotonic()) <= 0:
            raise TimeoutError("not every peer has connected in time")
        listener.settimeout(left_s)
        connection, _ = listener.accept()
        peer = peer_of(connection)
        # Before a word is waited for: another user could hold the opening up.
        if peer is None or peer[1] != os.geteuid():
            connection.close()
            continue
        connection.settimeout(min(1.0, left_s))
        hello = b""
        with suppress(OSError):
            while len(hello) < HELLO.size and (more := connection.recv(HELLO.size - len(hello))):
                hello += more
        said, rank = HELLO.unpack(hello.ljust(HELLO.size))
        if hmac.compare_digest(said, secret.encode()) and 0 < rank < world_size:
            found[rank] = connection
        else:
            connection.close()
    return found
