"""Run functions on real ranks, for tests of everything that communicates.

`run_ranks` starts one process per rank, initialises a gloo process group on a file rendezvous, and brings
back every rank's value. A rank that fails, hangs or exits fails the caller, and its peers are ended.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_any
from pathlib import Path
from typing import Any

START_S = 60.0
"""Time that importing torch and meeting may take on top of a test's own time-out."""
END_S = 15.0
"""Time that the survivors of a lost rank may take to end."""


class RankError(AssertionError):
    """A rank failed, hung or exited; the message holds its group rank and traceback."""


class UnmetError(RankError):
    """A rank's process group could not be made."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    timeout_s: float = 30.0,
    args: Sequence[Any] = (),
    group_timeout_s: float = 20.0,
    lost: Collection[int] = (),
    setup: Callable[..., str] | None = None,
) -> list[Any]:
    """Run ``fn(rank, world_size, *args)`` on ``world_size`` gloo ranks and return their values by rank.

    Args:
        fn: a function at module level; it runs in a process of its own, with the caller's environment.
        timeout_s: how long ``fn`` may take after all ranks have met.
        group_timeout_s: the process group's own time-out.
        lost: ranks that are killed, stopped or cut off on purpose: nothing is expected of them, and their value is
            None. The others must then also end by themselves, with exit code 0.
        setup: called as ``setup(rank, *args)`` before the rank meets the others; returns the ``init_method``.
            None meets through a file.

    Raises:
        RankError: a rank raised (with its traceback), did not finish in time, or exited. Where gloo could not connect
            the ranks, all are started once more: about once in several thousand worlds it finds a connection closed.
    """
    run = partial(_run_once, fn, world_size, timeout_s, args, group_timeout_s, lost, setup)
    try:
        return run()
    except UnmetError:
        return run()


def _run_once(
    fn: Callable[..., Any],
    world_size: int,
    timeout_s: float,
    args: Sequence[Any],
    group_timeout_s: float,
    lost: Collection[int],
    setup: Callable[..., str] | None,
) -> list[Any]:
    context = _context()
    with tempfile.TemporaryDirectory(prefix="specsync-ranks-") as folder:
        meet = setup or partial(_meet_through_file, str(Path(folder) / "rendezvous"))
        pipes, processes = [], []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(sender, fn, rank, world_size, meet, args, group_timeout_s, dict(os.environ)),
                daemon=True,
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            values = _gather(pipes, processes, timeout_s, lost)
            if lost:
                _expect_orderly_ends(processes, lost)
            return values
        finally:
            for process in processes:
                process.kill() if process.is_alive() else None
                process.join()
            for pipe in pipes:
                pipe.close()


def _context() -> Any:
    """Processes are forked from a server that has imported torch once; never from the caller, which has threads."""
    if sys.platform != "linux":
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed"])
    return context


def _meet_through_file(rendezvous: str, rank: int, *args: Any) -> str:
    return f"file://{rendezvous}"


def _expect_orderly_ends(processes: list[Any], lost: Collection[int]) -> None:
    deadline = time.monotonic() + END_S
    for rank, process in enumerate(processes):
        if rank not in lost:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode != 0:
                how = "did not exit" if process.exitcode is None else f"exited with code {process.exitcode}"
                raise RankError(f"rank {rank} returned its value, but {how} within {END_S:g} s")


def _gather(pipes: list[Connection], processes: list[Any], timeout_s: float, lost: Collection[int]) -> list[Any]:
    values: dict[int, Any] = dict.fromkeys(lost)
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    deadline = time.monotonic() + START_S + timeout_s
    met = 0
    while set(waiting.values()) - set(lost):
        ready = wait_any(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"ranks {sorted(waiting.values())} of {len(pipes)} did not finish within {timeout_s:g} s")
        for pipe in ready:
            rank = waiting[pipe]  # type: ignore[index]
            try:
                kind, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                if rank in lost:
                    del waiting[pipe]  # type: ignore[arg-type]
                    continue
                processes[rank].join(5)
                raise RankError(f"rank {rank} exited with code {processes[rank].exitcode} and no value") from None
            if kind in ("error", "unmet"):
                raise (RankError if kind == "error" else UnmetError)(f"rank {rank} failed:\n{value}")
            if kind == "met":
                met += 1
                deadline = time.monotonic() + timeout_s if met == len(pipes) else deadline
            else:
                values[rank] = value
                del waiting[pipe]  # type: ignore[arg-type]
    return [values[rank] for rank in range(len(pipes))]


def _rank_main(
    sender: Connection,
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    meet: Callable[..., str],
    args: Sequence[Any],
    group_timeout_s: float,
    environ: dict[str, str],
) -> None:
    os.environ.clear()  # the server that this process was forked from has an older one
    os.environ.update(environ)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    failure = "error"
    try:
        init_method = meet(rank, *args)
        failure = "unmet"
        dist.init_process_group(
            "gloo",
            init_method=init_method,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=group_timeout_s),
        )
        failure = "error"
        sender.send_bytes(pickle.dumps(("met", None)))
        value = fn(rank, world_size, *args)
        # By value, not through shared memory: the process ends before its parent reads.
        sender.send_bytes(pickle.dumps(("value", value)))
    except BaseException:
        sender.send_bytes(pickle.dumps((failure, traceback.format_exc())))
    finally:
        sender.close()
        if dist.is_initialized():
            dist.destroy_process_group()
