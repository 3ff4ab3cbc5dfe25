"""Ranks as threads of one process: a group that meets in memory, for tests that need no network and no processes."""

from __future__ import annotations

import json
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specsync_core.errors import SpecSyncError, TransportError
from specsync_core.payload import describe
from specsync_core.testing.ranks import RankError


class Meeting:
    """Where the threads of one fake group wait for each other. All of them come to the same meetings, or all raise."""

    def __init__(self, world_size: int, timeout_s: float = 30.0) -> None:
        self.world_size = world_size
        self._timeout_s = timeout_s
        self._condition = threading.Condition()
        self._turn = 0
        self._brought: dict[int, tuple[str, Any]] = {}
        self._met: list[tuple[str, Any]] = []
        self._away: dict[int, str] = {}
        """Why a rank will not come any more."""

    def gather(self, rank: int, what: str, value: Any) -> list[Any]:
        """Bring a value, and return every rank's.

        Raises:
            TransportError: on every rank: they came for different things, or one has ended or does not come.
        """
        with self._condition:
            turn = self._turn
            self._brought[rank] = (what, value)
            if len(self._brought) == self.world_size:
                self._met = [self._brought[each] for each in range(self.world_size)]
                self._brought = {}
                self._turn += 1
                self._condition.notify_all()
            elif not self._condition.wait_for(lambda: self._turn > turn or bool(self._away), self._timeout_s):
                raise TransportError(
                    f"{what}: group rank {rank} waited {self._timeout_s:g} s, and the others did not come"
                )
            if self._turn == turn:
                why = "; ".join(f"group rank {other} {reason}" for other, reason in self._away.items())
                raise TransportError(f"{what}: group rank {rank} waits, but {why}")
            met = self._met
        if len({name for name, _ in met}) > 1:
            places = "; ".join(f"group rank {other} in {name}" for other, (name, _) in enumerate(met))
            raise TransportError(f"the ranks' calls do not match: {places}")
        return [brought for _, brought in met]

    def leave(self, rank: int, reason: str) -> None:
        """Say that a rank comes no more; who waits for it raises."""
        with self._condition:
            self._away.setdefault(rank, reason)
            self._condition.notify_all()


@dataclass
class FakeStore:
    """Stands in for `specsync_core.group_store.GroupStore`: the meetings of start-up, and the word of a failure."""

    rank: int
    meeting: Meeting
    place: str | None = None

    @property
    def world_size(self) -> int:
        return self.meeting.world_size

    def exchange(self, topic: str, payload: Any, timeout_s: float) -> list[Any]:
        return [json.loads(text) for text in self.meeting.gather(self.rank, topic, json.dumps(payload))]

    def fail(self, error: SpecSyncError) -> None:
        self.meeting.leave(self.rank, f"gave up: {error}")

    def glance(self) -> None:
        """A peer's failure is heard of in the next meeting."""

    raise_failure = leave = glance

    def enter(self, what: str) -> None:
        """There is no watch to tell."""

    def roll_call(self, cause: object = None) -> str:
        return "the ranks are threads of one process."


@dataclass
class FakeHost:
    """The ``cpu_group`` of a `FakeGroup`."""

    rank: int
    meeting: Meeting
    specsync_store: FakeStore = field(init=False)

    def __post_init__(self) -> None:
        self.specsync_store = FakeStore(self.rank, self.meeting)

    def gather_bytes(self, data: bytes, what: str) -> list[bytes]:
        return self.meeting.gather(self.rank, what, data)


class FakeGroup:
    """One rank of a group whose ranks are threads: a `specsync_core.groups.Group` that `SpecTpSync` takes as it is.

    Handshake, self-test of the transport, broadcasts and host agreements all work. Make them with `run_fake_ranks`.
    """

    device = torch.device("cpu")

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank_in_group = rank
        self.world_size = meeting.world_size
        self.ranks = list(range(meeting.world_size))
        self.cpu_group = FakeHost(rank, meeting)
        self._meeting = meeting

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Overwrite ``tensor`` with that of group rank ``src``, in place.

        Raises:
            TransportError: on every rank: their shapes, dtypes or calls differ, or one has ended.
        """
        own = tensor.clone() if self.rank_in_group == src else None
        what = f"a broadcast of {describe([tensor])} from group rank {src}"
        brought = self._meeting.gather(self.rank_in_group, what, own)
        if self.rank_in_group != src:
            tensor.copy_(brought[src])
        return tensor

    def gather(self, value: Any, what: str = "a gather of the test") -> list[Any]:
        """Return every rank's value, by group rank; for what a test compares."""
        return self._meeting.gather(self.rank_in_group, what, value)

    def __repr__(self) -> str:
        return f"FakeGroup(group rank {self.rank_in_group} of {self.world_size})"


def run_fake_ranks(
    fn: Callable[..., Any], world_size: int, timeout_s: float = 30.0, args: Sequence[Any] = ()
) -> list[Any]:
    """Run ``fn(group, *args)`` on ``world_size`` threads, each with its `FakeGroup`, and return their values by rank.

    Args:
        timeout_s: how long a rank may wait for the others.

    Raises:
        RankError: a rank raised; with the traceback of the one that was the first to.
    """
    meeting = Meeting(world_size, timeout_s)
    values: dict[int, Any] = {}
    failures: list[tuple[int, str]] = []

    def member(rank: int) -> None:
        try:
            values[rank] = fn(FakeGroup(rank, meeting), *args)
            meeting.leave(rank, "has ended")
        except BaseException as error:
            failures.append((rank, traceback.format_exc()))
            meeting.leave(rank, f"has failed: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=member, args=(rank,), name=f"fake rank {rank}") for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        rank, words = failures[0]
        raise RankError(f"rank {rank} failed:\n{words}")
    return [values[rank] for rank in range(world_size)]
