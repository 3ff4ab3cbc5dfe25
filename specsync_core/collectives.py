"""Waiting for collectives, and meeting through a group's store, so that ranks fail together.

A rank that gives up writes its reason to the store of its CPU group. A peer that waits looks there a few
times a second, so it raises with that reason instead of waiting for its own time-out.
"""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from specsync_core import errors
from specsync_core.errors import SpecSyncError, TransportError

SLICE = timedelta(milliseconds=250)
GLANCE_S = 1.0


class AbsentRankError(TransportError):
    """A rank did not come to a meeting in time."""


class GroupStore:
    """The key-value store behind a gloo group, as a meeting place that needs no collective.

    Unlike a collective it tells *which* rank is absent, and it still works when a collective is stuck.
    Obtain it with `store_of`, so that everything in this process counts its meetings together.
    """

    def __init__(self, cpu_group: dist.ProcessGroup) -> None:
        self._store = PrefixStore("specsync", cpu_group.get_group_store())
        self.rank = dist.get_rank(cpu_group)
        self.world_size = cpu_group.size()
        self._meetings: dict[str, int] = {}
        self._failure: dict[str, str] | None = None
        self._next_glance = 0.0

    def exchange(self, topic: str, payload: Any, timeout_s: float) -> list[Any]:
        """Give ``payload`` (anything JSON can hold) and return every rank's, by group rank.

        Raises:
            AbsentRankError: a rank did not come within ``timeout_s``; raised on every rank, the late
                one included, naming the absent ranks.
            SpecSyncError: a peer had given up before; the error that it raised.
        """
        meeting = self._meetings[topic] = self._meetings.get(topic, 0) + 1
        key = f"{topic}/{meeting}"
        self._store.set(f"{key}/{self.rank}", json.dumps(payload))
        absent = self._collect(key, timeout_s)
        # A second phase, so that a rank that comes after the others gave up learns that they did.
        self._store.set(f"{key}/verdict/{self.rank}", json.dumps(absent))
        undecided = [] if absent else self._collect(f"{key}/verdict", timeout_s)
        missed = sorted({*absent, *undecided, *self._missed_by_others(f"{key}/verdict", absent or undecided)})
        if missed:
            raise AbsentRankError(
                f"{topic}: group rank{'s' if len(missed) > 1 else ''} {', '.join(map(str, missed))} of"
                f" {self.world_size} did not arrive within {timeout_s:g} s (this is group rank {self.rank})."
                " Is the process alive, and does it load specsync at the same place?"
                " SPECSYNC_TIMEOUT_S sets the time-out."
            )
        return [json.loads(self._store.get(f"{key}/{rank}")) for rank in range(self.world_size)]

    def _collect(self, key: str, timeout_s: float) -> list[int]:
        deadline = time.monotonic() + timeout_s
        waiting = list(range(self.world_size))
        pause_s = 0.0005
        while waiting := [rank for rank in waiting if not self._store.check([f"{key}/{rank}"])]:
            self.raise_failure()
            if time.monotonic() > deadline:
                break
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, 0.02)
        return waiting

    def _missed_by_others(self, key: str, give_up: list[int]) -> set[int]:
        missed: set[int] = set()
        for rank in range(self.world_size):
            if rank not in give_up and self._store.check([f"{key}/{rank}"]):
                missed.update(json.loads(self._store.get(f"{key}/{rank}")))
        return missed

    def fail(self, error: SpecSyncError) -> None:
        """Tell the peers that this rank gives up, and why. The first failure stays."""
        record = {"kind": type(error).__name__, "reason": f"group rank {self.rank} gave up: {error}"}
        if self._failure is None:
            self._failure = record
            if not self._store.check(["failure"]):
                self._store.set("failure", json.dumps(record))

    def raise_failure(self) -> None:
        """Raise when any rank of the group has given up: the error that it raised, with its group rank."""
        if self._failure is None and self._store.check(["failure"]):
            self._failure = json.loads(self._store.get("failure"))
        if self._failure is not None:
            kind = getattr(errors, self._failure["kind"], TransportError)
            raise kind(f"{self._failure['reason']}\n  The group no longer agrees: end its processes.")

    def glance(self) -> None:
        """`raise_failure`, at most once a second: cheap enough for every call of a hot path."""
        now = time.monotonic()
        if self._failure is not None or now > self._next_glance:
            self._next_glance = now + GLANCE_S
            self.raise_failure()


_stores: WeakKeyDictionary[Any, GroupStore] = WeakKeyDictionary()


def store_of(cpu_group: dist.ProcessGroup) -> GroupStore:
    """Return the one `GroupStore` of this process for a gloo group."""
    if (store := _stores.get(cpu_group)) is None:
        store = _stores[cpu_group] = GroupStore(cpu_group)
    return store


def wait(work: Any, cpu_group: dist.ProcessGroup, what: str) -> None:
    """Wait for a gloo collective, as long as its process group's own time-out allows.

    Raises:
        TransportError: it failed or timed out, or a peer reported that it gave up.
    """
    store = store_of(cpu_group)
    while True:
        try:
            work.wait(SLICE)
            return
        except RuntimeError as error:
            store.raise_failure()
            if work.is_completed():  # not just this slice: the collective itself has failed
                failure = TransportError(
                    f"{what} on group rank {store.rank} of {store.world_size}: {str(error).splitlines()[0]}"
                )
                store.fail(failure)
                raise failure from error


def gather_bytes(cpu_group: dist.ProcessGroup, data: bytes, what: str) -> list[bytes]:
    """Return every rank's bytes, by group rank. All ranks bring equally many.

    Raises:
        TransportError: as `wait`; ``what`` names the act in the message.
    """
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    frames = [torch.empty_like(own) for _ in range(store_of(cpu_group).world_size)]
    wait(dist.all_gather(frames, own, group=cpu_group, async_op=True), cpu_group, what)
    return [bytes(frame.tolist()) for frame in frames]
