"""Writing a file that readers see whole at any time: the old one, or the new one."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def replace_whole(path: Path, text: str, *, durable: bool = False) -> None:
    """Write a file beside its place, and move it there in one act.

    A write that fails leaves the old file as it was, and nothing beside it.

    Args:
        text: the new content, as UTF-8.
        durable: it must outlast a machine that goes down.

    Raises:
        OSError: it cannot be written.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise
