"""Runs of the command: started in a session of their own, watched, and ended with all that they have started."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from specsync_core.bisect import guard
from specsync_core.errors import BisectError
from specsync_core.settings import inherited_environment

GRACE_S = 5.0
"""Time to end in after SIGTERM, before SIGKILL."""
STRAGGLERS_S = 2.0
"""Time that processes which outlive the command's own have to end by themselves."""
POLL_S = 0.05


@dataclass
class Child:
    """One run. Its ``mark`` is in the environment of every process that it starts."""

    folder: Path
    mark: str
    process: subprocess.Popen[bytes]
    limit_s: float
    began_s: float = field(default_factory=time.monotonic)
    began_at_s: float = field(default_factory=time.time)
    """Wall clock."""
    exit_code: int | None = None
    seconds: float = 0.0
    """How long the command itself ran, or was let run."""
    timed_out: bool = False
    aborted: bool = False
    _has_ended: bool = False
    _kill_at_s: float | None = None

    @property
    def group(self) -> int:
        return self.process.pid

    def abort(self) -> None:
        """Have it ended, because nobody wants to know how it goes on."""
        self.aborted = True

    def advance(self) -> bool:
        """Do what is due; True when nothing of it lives any more. Never waits."""
        now = time.monotonic()
        if not self._has_ended:
            code = self.process.poll()
            due = now > self.began_s + self.limit_s
            if code is None and not due and not self.aborted:
                return False
            self._note_end(code, now)
        if self.process.poll() is not None and not _is_alive(self.group):
            return self._sweep()
        if self._kill_at_s is not None and now > self._kill_at_s:
            guard.end_group(self.group)
            self._kill_at_s = now + GRACE_S  # what is stuck in the kernel dies when it comes out
            return self.process.poll() is not None and self._sweep()
        return False

    def _note_end(self, code: int | None, now: float) -> None:
        self._has_ended, self.exit_code, self.seconds = True, code, now - self.began_s
        self.timed_out = code is None and not self.aborted
        if code is None:
            guard.end_group(self.group, signal.SIGTERM)
        self._kill_at_s = now + (GRACE_S if code is None else STRAGGLERS_S)

    def _sweep(self) -> bool:
        guard.end_group(self.group)
        guard.end_carrying(self.mark)
        return True

    def kill(self) -> None:
        """End everything now, and wait for it."""
        guard.end_group(self.group)
        guard.end_carrying(self.mark)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE_S)


def _is_alive(group: int) -> bool:
    return guard.end_group(group, 0)


class Pool:
    """Every run that is under way. Leaving the context ends them, whatever happens; so does the end of this process.

    Args:
        command: a program with its arguments.
        directory: where it runs; None leaves it to this process.
    """

    def __init__(self, command: Sequence[str], directory: str | None = None) -> None:
        self._command = list(command)
        self._directory = directory
        self.children: list[Child] = []
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children:
            child.kill()
        assert self._guard.stdin is not None
        with contextlib.suppress(OSError):
            self._guard.stdin.close()
        self._guard.wait()

    def start(self, folder: Path, variables: Mapping[str, str | None], mark: str, limit_s: float) -> Child:
        """Start a run; its output goes to ``stdout`` and ``stderr`` in a folder.

        Args:
            variables: set in its environment, or taken out of it where None.
            mark: a text among the variables' values that is in no other process's environment.

        Raises:
            BisectError: the command cannot be started.
        """
        environment = inherited_environment()
        for name, value in variables.items():
            environment.pop(name, None)
            if value is not None:
                environment[name] = value
        try:
            with (folder / "stdout").open("wb") as output, (folder / "stderr").open("wb") as errors:
                process = subprocess.Popen(
                    self._command,
                    env=environment,
                    cwd=self._directory,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=errors,
                    start_new_session=True,
                )
        except OSError as error:
            raise BisectError(
                f"{self._command[0]}: cannot be run: {error.strerror or error}. Give a program and its arguments"
                " behind `--`."
            ) from error
        child = Child(folder, mark, process, limit_s)
        self.children.append(child)
        self._tell(f"+ {child.group} {mark}")
        return child

    def take_ended(self) -> list[Child]:
        """Return the runs of which nothing lives any more, each once. Never waits."""
        ended = [child for child in self.children if child.advance()]
        for child in ended:
            self.children.remove(child)
            self._tell(f"- {child.group}")
        return ended

    def _tell(self, line: str) -> None:
        assert self._guard.stdin is not None
        with contextlib.suppress(OSError):  # it was killed; this process still ends its runs
            self._guard.stdin.write(f"{line}\n".encode())
            self._guard.stdin.flush()


class Interrupts:
    """Counts SIGINT, SIGTERM and SIGHUP instead of dying of them, while the context lasts.

    One that is ignored (``nohup``) stays ignored.

    Args:
        heard: called with the number of signals so far; from a signal handler, so it must be quick.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self, heard: Callable[[int], None] = lambda count: None) -> None:
        self.count = 0
        self.number = 0
        """The first signal's number."""
        self._heard = heard
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interrupts:
        self._before = {
            number: signal.signal(number, self._note)
            for number in self.SIGNALS
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, _: object) -> None:
        self.count += 1
        self.number = self.number or number
        self._heard(self.count)
