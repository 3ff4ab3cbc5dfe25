"""Ends a bisection's runs when the bisection itself is killed: a process of its own that outlives it by a moment.

It is told of process groups on its standard input, ``+ PGID MARK`` and ``- PGID``, and acts when that is closed.
Standard library only, and no other module of this package: it is run as a script.
"""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path


def end_group(group: int, number: int = signal.SIGKILL) -> bool:
    """Send a signal to a process group; False when nobody is left in it."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:  # some of it is another user's; what is ours was signalled
        return True
    return True


def carrying(mark: str) -> Iterator[int]:
    """Yield the ids of living processes that have this text in their environment, whatever group they are in."""
    text = mark.encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if text in (entry / "environ").read_bytes() and int(entry.name) != os.getpid():
                yield int(entry.name)
        except OSError:
            continue


def end_carrying(mark: str) -> None:
    """End every process that carries the mark, also one that has left its group and session."""
    for _ in range(3):  # one that is seen may have a child that is not
        found = list(carrying(mark))
        for process in found:
            try:
                os.kill(process, signal.SIGKILL)
            except OSError:
                continue
        if not found:
            return


def main() -> None:
    marks: dict[int, str] = {}
    for line in sys.stdin:
        sign, group, *mark = line.rstrip("\n").split(" ", 2)
        if sign == "+":
            marks[int(group)] = mark[0]
        else:
            marks.pop(int(group), None)
    for group, text in marks.items():
        end_group(group)
        end_carrying(text)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    main()
