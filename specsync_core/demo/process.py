"""The life of one rank's process: its log, its jobs, its reports to the parent, and its end.

Importing this module imports no torch, so that the parent can name `main` without it.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path

from specsync_core.demo.config import World

REPORT_EVERY_S = 0.1


def log_path(folder: Path, rank: int) -> Path:
    """Where a rank's process writes what would go to the terminal."""
    return folder / f"rank-{rank}.log"


def nothing() -> None:
    """What a process does that is started for the imports of its server alone."""


def main(world: World, rank: int, rendezvous: Path, folder: Path, litter: Sequence[Path], pipe: Connection) -> None:
    """What a rank's process does. It always leaves through ``os._exit``: closing a group with a lost peer may wait.

    Args:
        folder: for recordings and logs.
        litter: directories that the parent removes when it ends, and a rank when the parent was killed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parting = threading.Thread(target=_exit_with_parent, args=(litter,), daemon=True)
    parting.start()
    _write_to(log_path(folder, rank))
    code = 0
    try:
        _do_jobs(world, rank, rendezvous, folder, pipe)
    except BaseException:
        code = 1
        try:
            pipe.send(("failed", traceback.format_exc()))
        except OSError:  # nobody listens: the parent was killed, and the thread tidies up before this process ends
            parting.join()
    finally:
        pipe.close()
        sys.stderr.flush()
        os._exit(code)


def _do_jobs(world: World, rank: int, rendezvous: Path, folder: Path, pipe: Connection) -> None:
    # gloo looks its address up by the host's name, which often does not resolve in a container.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    import torch

    from specsync_core.demo.worker import Rank, connect

    torch.set_num_threads(1)
    if world.device == "cuda":
        torch.cuda.set_device(rank)
    member = Rank(world, rank, connect(world, rank, rendezvous), folder)
    pipe.send(("up",))
    for job in world.jobs:
        pipe.send(("begin", job.name))
        pipe.send(("done", member.do(job, _throttled(lambda step: pipe.send(("step", step))))))
    threading.Event().wait()  # the parent ends all ranks together: none closes its sockets while a peer still reads


def _throttled(send: Callable[[int], None]) -> Callable[[int], None]:
    last = 0.0

    def report(step: int) -> None:
        nonlocal last
        if (now := time.monotonic()) > last + REPORT_EVERY_S:
            last = now
            send(step)

    return report


def _exit_with_parent(litter: Sequence[Path]) -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    for directory in litter:
        shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)


def _write_to(log: Path) -> None:
    """Send everything that this process writes, native libraries included, to a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
