"""One bisection writes a report at a time: two would number their trials alike, and lose each other's."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from specsync_core.errors import BisectError


@contextmanager
def hold(report: Path) -> Iterator[None]:
    """Hold a lock beside a report, which ends with this process however that ends.

    Raises:
        BisectError: another process holds it, or it cannot be made.
    """
    path = report.with_name(f".{report.name}.lock")
    try:
        descriptor = _open_locked(path)
    except OSError as error:
        raise BisectError(
            f"{report}: the report cannot be written: {error.strerror or error}. Give another place with --report."
        ) from error
    if descriptor is None:
        raise BisectError(
            f"{report}: the bisection of process {_holder(path)} is writing this report. Wait for it, or give another"
            " --report."
        )
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        os.close(descriptor)


def _open_locked(path: Path) -> int | None:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, path):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, str(os.getpid()).encode())
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        os.close(descriptor)  # its holder ended and removed it between the two calls


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    try:
        return path.read_text() or "?"
    except OSError:
        return "?"
