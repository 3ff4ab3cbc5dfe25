"""The watchdog: a thread that writes a dump when this rank does not get on, when a peer says so, or on SIGUSR1.

It acts while the main thread is stuck in a native collective, which has let go of the interpreter's lock. Where
native code keeps that lock no thread can act; the recording, which is a mapped file, is there all the same.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from specsync_core.diagnostics.dump import dump_path, write_dump
from specsync_core.diagnostics.facts import generators
from specsync_core.diagnostics.recorder import Recorder
from specsync_core.diagnostics.recording import stacks_path

logger = logging.getLogger("specsync")

LONGEST_TICK_S = 0.25
STATS_S = 2.0
"""How long reading the counters may take: a device may not answer."""
MAX_SIGNAL_BYTES = 200_000

Stats = Callable[[], Mapping[str, Any]]
Tell = Callable[[str], object]


class Watchdog:
    """Watches one recorder.

    Args:
        after_s: a call, wait or step from which no record came for so long is a stall.
        stats: reads the counters without waiting for the device's stream; called on a thread of its own.
        tell: tells the peers that this rank stalls, so that they write dumps too.
        on_signal: write a dump when the process gets SIGUSR1.
    """

    def __init__(
        self,
        recorder: Recorder,
        after_s: float,
        *,
        stats: Stats | None = None,
        tell: Tell | None = None,
        on_signal: bool = True,
    ) -> None:
        self._recorder = recorder
        self._after_s = after_s
        self._stats = stats
        self._tell = tell
        self._asked: list[str] = []
        """Reasons for which others want a dump."""
        self._wake = threading.Event()
        self._ended = False
        self._dumped_at_s: float | None = None
        """`Recorder.moved_s` of the stall that was dumped last."""
        self.path = dump_path(recorder.path.parent, recorder.group_rank)
        self._signals = _Signals(stacks_path(recorder.path)) if on_signal else None
        self._thread = threading.Thread(target=self._run, name="specsync-watchdog", daemon=True)
        self._thread.start()

    def ask(self, reason: str) -> None:
        """Ask for a dump, from any thread; returns at once."""
        self._asked.append(reason)
        self._wake.set()

    def close(self) -> None:
        """End the thread."""
        self._ended = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)
        if self._signals is not None:
            self._signals.close()

    def _run(self) -> None:
        tick_s = min(LONGEST_TICK_S, self._after_s / 4)
        while not self._ended:
            self._wake.wait(tick_s)
            self._wake.clear()
            try:
                self._look()
            except Exception as error:  # a full disk ends no engine, and the next stall gets another try
                logger.warning("specsync: no dump could be written: %s", error)

    def _look(self) -> None:
        if self._asked:
            reasons, self._asked = self._asked, []
            self._write("; ".join(reasons))
        if self._signals is not None and (stacks := self._signals.take()):
            self._write("SIGUSR1", {"at the signal": stacks})
        recorder = self._recorder
        moved_s = recorder.moved_s
        still_s = time.monotonic() - moved_s
        if not recorder.busy or still_s < self._after_s or moved_s == self._dumped_at_s:
            return
        inside = " in ".join(reversed(list(recorder.busy.values()))) or "nothing"
        self._dumped_at_s = moved_s
        self._write(f"no progress for {still_s:.1f} s inside {inside}")
        logger.warning(
            "specsync: group rank %d (pid %d) has made no progress for %.1f s inside %s. Every rank that lives writes a"
            " dump: read them with `specsync doctor %s`. (A long compilation looks the same.)",
            recorder.group_rank, os.getpid(), still_s, inside, self.path.parent,
        )  # fmt: skip
        if self._tell is not None:
            self._tell(f"group rank {recorder.group_rank} has made no progress for {still_s:.1f} s inside {inside}")

    def _write(self, reason: str, stacks: Mapping[str, list[str]] | None = None) -> None:
        recorder = self._recorder
        inside = tuple(recorder.busy.values())
        write_dump(
            self.path,
            recorder.read(),
            recorder.about,
            reason=reason,
            inside=inside,
            stats=self._read_stats(),
            generators=generators(recorder.cuda_device),
            extra_stacks=stacks,
        )

    def _read_stats(self) -> Mapping[str, Any] | None:
        """The counters, unless the device keeps them for too long; then a thread is left behind that waits for it."""
        if self._stats is None:
            return None
        found: list[Mapping[str, Any]] = []
        stats = self._stats

        def read() -> None:
            with suppress(Exception):
                found.append(stats())

        reader = threading.Thread(target=read, name="specsync-stats", daemon=True)
        reader.start()
        reader.join(STATS_S)
        return found[0] if found else None


class _Signals:
    """SIGUSR1: its handler, which is native, writes every thread's stack to a file, whatever the main thread does.

    Python's own handlers run on the main thread alone, between two bytecodes: never, while it is stuck.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - the handler keeps it for the process's life
        self._size = 0
        before = signal.getsignal(signal.SIGUSR1)
        chain = before not in (signal.SIG_DFL, signal.SIG_IGN, None)
        faulthandler.register(signal.SIGUSR1, file=self._file, all_threads=True, chain=chain)

    def take(self) -> list[str]:
        """Return the lines that came since the last time, and empty the file."""
        size = os.fstat(self._file.fileno()).st_size
        if not size or size != self._size:  # the handler may still be writing
            self._size = size
            return []
        self._size = 0
        text = os.pread(self._file.fileno(), MAX_SIGNAL_BYTES, 0)
        os.ftruncate(self._file.fileno(), 0)
        return text.decode("utf-8", errors="replace").splitlines()

    def close(self) -> None:
        faulthandler.unregister(signal.SIGUSR1)
        self._file.close()
        self._path.unlink(missing_ok=True)
