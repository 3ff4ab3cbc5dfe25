"""Run functions on real ranks, for tests of everything that communicates.

`run_ranks` spawns one process per rank, initialises a gloo process group on a file rendezvous, and brings
back every rank's value. A rank that fails, hangs or exits fails the caller, and its peers are ended.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_any
from pathlib import Path
from typing import Any

START_S = 60.0
"""Time that importing torch and meeting may take on top of a test's own time-out."""


class RankError(AssertionError):
    """A rank failed, hung or exited; the message holds its group rank and traceback."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    timeout_s: float = 30.0,
    args: Sequence[Any] = (),
    group_timeout_s: float = 20.0,
) -> list[Any]:
    """Run ``fn(rank, world_size, *args)`` on ``world_size`` gloo ranks and return their values by rank.

    Args:
        fn: a function at module level (processes are spawned, not forked).
        timeout_s: how long ``fn`` may take after all ranks have met.
        group_timeout_s: the process group's own time-out.

    Raises:
        RankError: a rank raised (with its traceback), did not finish in time, or exited.
    """
    import torch.multiprocessing as multiprocessing

    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="specsync-ranks-") as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(sender, fn, rank, world_size, str(Path(folder) / "rendezvous"), args, group_timeout_s),
                daemon=True,
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            return _gather(pipes, processes, timeout_s)
        finally:
            for process in processes:
                process.kill() if process.is_alive() else None
                process.join()
            for pipe in pipes:
                pipe.close()


def _gather(pipes: list[Connection], processes: list[Any], timeout_s: float) -> list[Any]:
    values: dict[int, Any] = {}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    deadline = time.monotonic() + START_S + timeout_s
    met = 0
    while waiting:
        ready = wait_any(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"ranks {sorted(waiting.values())} of {len(pipes)} did not finish within {timeout_s:g} s")
        for pipe in ready:
            rank = waiting[pipe]  # type: ignore[index]
            try:
                kind, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                processes[rank].join(5)
                raise RankError(f"rank {rank} exited with code {processes[rank].exitcode} and no value") from None
            if kind == "error":
                raise RankError(f"rank {rank} failed:\n{value}")
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
    rendezvous: str,
    args: Sequence[Any],
    group_timeout_s: float,
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=group_timeout_s),
        )
        sender.send_bytes(pickle.dumps(("met", None)))
        value = fn(rank, world_size, *args)
        # By value, not through shared memory: the process ends before its parent reads.
        sender.send_bytes(pickle.dumps(("value", value)))
    except BaseException:
        sender.send_bytes(pickle.dumps(("error", traceback.format_exc())))
    finally:
        sender.close()
        if dist.is_initialized():
            dist.destroy_process_group()
