"""The demo's processes, as their parent sees them: start ranks, notice that they hang, and end every one of them.

No torch here: the parent only watches. Nothing outlives the parent, whatever ends it: a rank that loses its
parent removes the folder of recordings and exits (`specsync_core.demo.process`).
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from multiprocessing import connection, forkserver, get_context, util
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from specsync_core.demo import process as rank_process
from specsync_core.demo.config import Job, JobResult, World

START_S = 120.0
"""Time for importing torch, meeting, testing transports and building an engine."""
GRACE_S = 1.5
"""How long the peers of a rank that ended are watched before all are ended: they fail, finish, or hang."""

OnStep = Callable[[str, int], None]
"""Told the job's name and how many steps group rank 0 has done in it."""


@dataclass
class Stop:
    """Why a job did not come to its end on every rank."""

    how: Literal["hang", "ended"]
    """``hang``: no rank moved for the hang time; ``ended``: a rank failed or its process died."""
    steps: dict[int, int]
    """Decode steps that each rank had reported, about ten times a second."""
    exit_codes: dict[int, int | None]
    """By group rank; None for a rank that still lived when it was ended from here."""
    errors: dict[int, str]
    """Tracebacks of ranks that raised."""
    logs: dict[int, str]
    """The end of what each rank wrote to its standard error."""
    waited_s: float
    """How long no rank had moved when a hang was called one."""


@dataclass
class End:
    """How a job ended: with every rank's result, or stopped."""

    job: Job
    ranks: dict[int, JobResult] | None
    """By group rank; None when it stopped."""
    stop: Stop | None = None


@contextlib.contextmanager
def recordings_folder() -> Iterator[Path]:
    """A temporary folder for rendezvous, recordings and logs, removed whatever happens."""
    folder = Path(tempfile.mkdtemp(prefix="specsync-demo-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_world(
    world: World, folder: Path, *, hang_after_s: float, on_step: OnStep = lambda job, step: None
) -> Generator[End, None, None]:
    """Start a world's ranks, let them do its jobs, and end them.

    Yields each job's end as soon as every rank has come to it. A job that stops is the last; while its end is being
    looked at, the ranks that hang still live.

    Args:
        folder: recordings go to ``folder / JOB``; also holds the rendezvous and the ranks' logs.
        hang_after_s: no rank reports a step for so long: they hang.

    Raises:
        RuntimeError: the ranks did not come to their first job; the message holds what they wrote.
    """
    with _Processes(world, folder) as processes:
        yield from _Watch(world, processes, hang_after_s, on_step).follow()


class _Processes:
    """One world's processes and the pipes that they report through. Leaving the context ends them all."""

    def __init__(self, world: World, folder: Path) -> None:
        self.folder = folder
        self.members: list[BaseProcess] = []
        self.pipes: dict[Connection, int] = {}
        context = _context(world)
        litter = [folder, Path(util.get_temp_dir())] if _forks(world) else [folder]
        rendezvous = Path(tempfile.mkdtemp(prefix="meet-", dir=folder)) / "store"
        try:
            for rank in range(world.ranks):
                receiver, sender = context.Pipe(duplex=False)
                arguments = (world, rank, rendezvous, folder, litter, sender)
                member = context.Process(target=rank_process.main, args=arguments, daemon=True)
                with _interrupts_held_back(world):
                    member.start()
                sender.close()
                self.members.append(member)
                self.pipes[receiver] = rank
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> _Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def receive(self, timeout_s: float) -> Iterator[tuple[int, tuple[Any, ...]]]:
        """Yield what ranks have to say, as rank and message; ``("gone",)`` once for a rank that ended."""
        for pipe in connection.wait(list(self.pipes), timeout=max(0.0, timeout_s)):
            assert isinstance(pipe, Connection)
            rank = self.pipes[pipe]
            try:
                yield rank, pipe.recv()
            except (EOFError, OSError):
                del self.pipes[pipe]
                pipe.close()
                self.members[rank].join(1.0)
                yield rank, ("gone",)

    def exit_codes(self) -> dict[int, int | None]:
        return {rank: member.exitcode for rank, member in enumerate(self.members)}

    def log(self, rank: int, size: int = 2000) -> str:
        try:
            return rank_process.log_path(self.folder, rank).read_text(errors="replace")[-size:].strip()
        except OSError:
            return ""

    def end(self) -> None:
        """End every rank that lives, by its process id, and wait for it."""
        for member in self.members:
            if member.is_alive():
                member.kill()
        for member in self.members:
            member.join()
        for pipe in self.pipes:
            pipe.close()


class _Watch:
    """Follows the ranks' reports until all have ended, one has failed, or none moves any more."""

    def __init__(self, world: World, processes: _Processes, hang_after_s: float, on_step: OnStep) -> None:
        self._world = world
        self._processes = processes
        self._hang_after_s = hang_after_s
        self._on_step = on_step
        self._results: dict[str, dict[int, JobResult]] = {job.name: {} for job in world.jobs}
        self._at: dict[int, str] = {}
        """The job that each rank has begun last."""
        self._steps = dict.fromkeys(range(world.ranks), 0)
        self._errors: dict[int, str] = {}
        self._deadline = time.monotonic() + START_S
        self._lost = False
        """A rank ended before its jobs did."""

    def follow(self) -> Iterator[End]:
        for job in self._world.jobs:
            results = self._results[job.name]
            while len(results) < self._world.ranks:
                left_s = self._deadline - time.monotonic()
                if left_s <= 0 or not self._processes.pipes:
                    yield End(job, None, self._stop())
                    return
                for rank, (kind, *content) in self._processes.receive(left_s):
                    self._handle(rank, kind, *content)
            yield End(job, results)

    def _handle(self, rank: int, kind: str, content: Any = None) -> None:
        if kind in ("gone", "failed"):
            if kind == "failed":
                self._errors[rank] = content
            if not self._lost:
                self._lost, self._deadline = True, time.monotonic() + GRACE_S
            return
        if not self._lost:
            starts = kind in ("up", "begin", "done")
            self._deadline = time.monotonic() + (START_S if starts else self._hang_after_s)
        if kind == "begin":
            self._at[rank], self._steps[rank] = content, 0
        elif kind == "step":
            self._steps[rank] = content
            if rank == 0:
                self._on_step(self._at[rank], content)
        elif kind == "done":
            self._results[self._at[rank]][rank] = content

    def _stop(self) -> Stop:
        ranks = range(self._world.ranks)
        logs = {rank: self._processes.log(rank) for rank in ranks}
        codes = self._processes.exit_codes()
        if len(self._at) < len(ranks):
            report = "\n".join(f"rank {rank}: {self._errors.get(rank) or logs[rank] or codes[rank]}" for rank in ranks)
            raise RuntimeError(f"the demo's ranks did not come to their first job:\n{report}")
        return Stop("ended" if self._lost else "hang", dict(self._steps), codes, self._errors, logs, self._hang_after_s)


def warm_up(world: World) -> None:
    """Import torch in the server that ranks are forked from, so that the first ranks start as fast as later ones."""
    if _forks(world):
        member = _context(world).Process(target=rank_process.nothing, daemon=True)
        member.start()
        member.join()


def _forks(world: World) -> bool:
    return world.device == "cpu" and sys.platform == "linux"


def _context(world: World) -> SpawnContext | ForkServerContext:
    """How processes start: forked from a server that has imported torch once, where forking is safe.

    CUDA and other systems get processes of their own from the start.
    """
    if not _forks(world):
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload(["specsync_core.demo.worker"])
    with _interrupts_ignored():
        forkserver.ensure_running()
    return context


def _interrupts_held_back(world: World) -> contextlib.AbstractContextManager[None]:
    """Ctrl-C goes to every process of a terminal, but the parent ends the ranks: they are born ignoring it.

    Forked ranks have that from their server, whose import of torch the parent may be waiting for here.
    """
    return contextlib.nullcontext() if _forks(world) else _interrupts_ignored()


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    # Not blocked: multiprocessing unblocks SIGINT when it starts its resource tracker.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
