"""Reading files that others wrote: never more than a bound, whatever the file is."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

MAX_TEXT_BYTES = 1 << 20
"""Bound of policy files and registries: a hundred times what they need."""
MAX_RECORDING_BYTES = 1 << 28
"""Bound of one rank's recording: more than a million records."""


class TooLongError(OSError):
    """A file holds more than its bound."""


class PipeError(OSError):
    """What is there is a pipe: reading it would wait for somebody to write."""


def read_bounded(path: Any, limit: int) -> bytes:
    """Return a file's bytes.

    Args:
        path: a ``Path`` or a ``Traversable``; one with ``read_bytes`` alone is read whole.

    Raises:
        TooLongError: it holds more than ``limit`` bytes; also for endless ones such as ``/dev/zero``.
        PipeError: it is a pipe, which is not read.
        OSError: it cannot be read.
    """
    if isinstance(path, Path):
        with open(path, "rb", opener=_open_at_once) as file:
            data: bytes = file.read(limit + 1)
    elif hasattr(path, "open"):
        with path.open("rb") as file:
            data = file.read(limit + 1)
    else:
        data = path.read_bytes()
    if len(data) > limit:
        raise TooLongError(f"it holds more than {limit} bytes, which is the bound; is it the right file?")
    return data


def _open_at_once(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # does not wait for a pipe's writer
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise PipeError("it is a pipe, and no file")
    return descriptor
