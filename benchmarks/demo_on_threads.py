"""The demo's engine in one process: its ranks are threads, and nothing but the wire between them is another one.

Engine, algorithm, plugins, policy, faults and counters are those of `specsync demo`. A trial takes hundredths of a
second where real processes take seconds, so that bisections can be repeated hundreds of times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specsync_core.demo.config import Job, JobResult, World
from specsync_core.demo.ranks import Stop
from specsync_core.demo.runner import Ended
from specsync_core.demo.tensor_parallel import Marks
from specsync_core.demo.worker import Rank
from specsync_core.errors import PayloadError, TransportError
from specsync_core.testing import FakeGroup, run_fake_ranks

NEVER_S = 86400.0
"""A process that was stopped for a while has not hung: what does not match is known without a time-out."""


@dataclass(frozen=True)
class ThreadCollectives:
    """`specsync_core.demo.model.Collectives` in memory. Calls that do not match raise on every rank, at once."""

    group: FakeGroup

    @property
    def rank(self) -> int:
        return self.group.rank_in_group

    @property
    def world_size(self) -> int:
        return self.group.world_size

    def all_reduce(self, tensor: Tensor, what: str) -> Tensor:
        """Sum over the ranks in their order, so that the bits are the same everywhere."""
        first, *others = self.group.gather(tensor, f"tp all-reduce: {what} {list(tensor.shape)}")
        return sum(others, first)

    def all_gather(self, tensor: Tensor, what: str) -> Tensor:
        return torch.cat(self.group.gather(tensor, f"tp all-gather: {what} {list(tensor.shape)}"), dim=-1)


@dataclass(frozen=True)
class ThreadWire:
    """All that a rank has of the others: a `specsync_core.demo.worker.Wire`."""

    group: FakeGroup

    def collectives(self, marks: Marks | None) -> ThreadCollectives:
        return ThreadCollectives(self.group)

    def lead(self, marks: Marks | None) -> Callable[[Callable[[], Any]], Any]:
        def first_reads(read: Callable[[], Any]) -> Any:
            own = None if self.group.rank_in_group else read()
            return self.group.gather(own, "request broadcast")[0]

        return first_reads


class ThreadEngine:
    """A world whose ranks keep their weights from job to job; each job runs on threads of its own.

    Args:
        world: its ``jobs`` are not looked at.
    """

    def __init__(self, world: World) -> None:
        self._members = [Rank(world, rank, None, Path("no-recordings")) for rank in range(world.ranks)]

    def run(self, job: Job) -> Ended:
        """Run a job without recordings. Where the ranks' calls do not match, real ranks would hang: it has hung."""
        ends = dict(enumerate(run_fake_ranks(self._do, len(self._members), NEVER_S, args=(job,))))
        errors = {rank: end for rank, end in ends.items() if not isinstance(end, JobResult)}
        if not errors:
            return Ended(job, ends, None, None)
        how = "hang" if all(isinstance(error, TransportError) for error in errors.values()) else "ended"
        words = {rank: f"{type(error).__name__}: {error}" for rank, error in errors.items()}
        return Ended(job, None, Stop(how, {}, {}, words, {}, 0.0), None)

    def _do(self, group: FakeGroup, job: Job) -> JobResult | Exception:
        torch.set_num_threads(1)
        member = self._members[group.rank_in_group]
        member.groups = ThreadWire(group)
        try:
            return member.do(job, lambda step: None)
        except (TransportError, PayloadError, IndexError) as error:  # ranks that have drifted; all else is a mistake
            return error
