"""What a run that was not good said for itself: the last line of its errors, or where its output is another."""

from __future__ import annotations

import os
from itertools import zip_longest
from pathlib import Path

TAIL_BYTES = 1 << 16
"""Of the standard error, read from its end."""
LINE_CHARACTERS = 200


def last_line(path: Path) -> str:
    """Return the last line of a file that is not blank; nothing where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((_short(line) for line in reversed(lines) if line.strip()), "")


def first_difference(output: bytes, expected: bytes) -> str:
    """Say at which line an output leaves the expected one, and with what."""
    pairs = zip_longest(output.split(b"\n"), expected.split(b"\n"))
    for number, (line, wanted) in enumerate(pairs, 1):
        if line != wanted:
            return f"line {number} is {_shown(line)}, not {_shown(wanted)}"
    return ""


def _shown(line: bytes | None) -> str:
    return "missing" if line is None else repr(_short(line.decode(errors="replace")))


def _short(line: str) -> str:
    line = line.strip("\r")
    return line if len(line) <= LINE_CHARACTERS else f"{line[: LINE_CHARACTERS - 3]}..."
