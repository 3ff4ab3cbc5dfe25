"""One trial of an algorithm on all ranks: what each called, brought and returned, also where it failed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol
from unittest.mock import patch

import torch

from specsync_core import replay
from specsync_core.algorithm import Algorithm
from specsync_core.errors import TransportError
from specsync_core.groups import Group, ParallelGroups
from specsync_core.plan import Plan
from specsync_core.sync import SpecTpSync
from specsync_core.testing.capture import CheckedReplay, Note, captures_noted
from specsync_core.testing.engine import FakeEngine, Result, Scenario, Skew
from specsync_core.testing.fake_group import run_fake_ranks
from specsync_core.testing.watch import Change, SiteCall, Watch


class Trial(NamedTuple):
    """What is to be run, the same on every rank."""

    scenario: Scenario
    skew: Skew = Skew()
    """Of every rank but group rank 0."""
    change: Change | None = None
    captures: bool = False
    """Then capture each graph site's own call, too."""


@dataclass
class Record:
    """What one rank did."""

    calls: list[SiteCall] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    error: tuple[str, str] | None = None
    """The error's type and its words."""
    is_echo: bool = False
    """It failed because another rank did not come."""
    captures: list[Note] = field(default_factory=list)
    sizes: list[tuple[str, str]] = field(default_factory=list)


class RunTrial(Protocol):
    """Runs a trial on all ranks, and returns every rank's record."""

    def __call__(self, trial: Trial) -> list[Record]: ...


def run_trial(group: Group, algorithm: Algorithm, plan: Plan, trial: Trial, device: torch.device) -> Record:
    """Run this rank's part of a trial. Never raises what the algorithm raises: it is in the record."""
    rank = group.rank_in_group
    watch = Watch(rank, len(trial.scenario.temperatures), trial.change)
    record = Record(watch.calls, sizes=watch.sizes)
    with captures_noted() as notes:
        try:
            sync = SpecTpSync(ParallelGroups(tp=group), plan, taps=[watch])
            skew = trial.skew if rank else Skew()
            watch.engine = FakeEngine(algorithm, sync, trial.scenario, rank=rank, skew=skew, device=device)
            record.results = watch.engine.run()
            if trial.captures:
                record.captures += _replayed(sync, watch, rank, device)
        except Exception as error:
            record.error = (type(error).__name__, str(error))
            record.is_echo = isinstance(error, TransportError)
    record.captures += notes
    return record


def _replayed(sync: SpecTpSync, watch: Watch, rank: int, device: torch.device) -> list[Note]:
    """Capture each site with ``graph = true`` on the shapes that it was called with, and replay it on other values."""
    called = {call.slug: call.shapes for call in watch.calls if sync.plan.registry.site(call.slug).graph}
    seen = len(watch.calls)
    problems: list[Note] = []
    for slug, shapes in called.items():
        buffers = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in shapes]
        point = sync.point(slug)
        point(*buffers)  # the same shapes were seen eagerly, as a capture needs
        graph = replay.Replay(partial(point, *buffers), device)
        for turn in (1, 2):
            for buffer in buffers:
                buffer.fill_((3 * turn + rank) % 2 if buffer.dtype == torch.bool else 3 * turn + rank)
            graph()
            roots = [torch.full_like(each, 3 * turn % 2 if each.dtype == torch.bool else 3 * turn) for each in buffers]
            if not all(torch.equal(*pair) for pair in zip(buffers, roots, strict=True)):
                problems.append(("a replay does not bring group rank 0's values", (slug,)))
    del watch.calls[seen:]
    return problems


def on_fake_ranks(algorithm: Algorithm, plan: Plan, world_size: int) -> RunTrial:
    """Trials on threads, with the stand-in for captures."""

    def run(trial: Trial) -> list[Record]:
        with patch.object(replay, "Replay", CheckedReplay):
            return run_fake_ranks(
                lambda group: run_trial(group, algorithm, plan, trial, torch.device("cpu")), world_size
            )

    return run


def on_this_group(
    group: Group, algorithm: Algorithm, plan: Plan, device: torch.device, exchange: Callable[[Record], list[Record]]
) -> RunTrial:
    """Trials of real ranks, of which this process is one; every rank runs the same trials in the same order.

    Args:
        exchange: brings every rank's record to every rank.
    """
    return lambda trial: exchange(run_trial(group, algorithm, plan, trial, device))
