"""How commands print: JSON, or tables that fit the terminal and never shorten a word."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import get_terminal_size
from textwrap import wrap
from typing import Annotated, Any

import typer

from specsync_core.errors import SpecSyncError
from specsync_core.settings import Setting

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]

WIDTH_WHEN_PIPED = 120
LEAST_LAST_COLUMN = 24


class UsageError(SpecSyncError):
    """An argument names something that does not exist, or that cannot be used or written. Exit code 2."""


def print_json(value: Any) -> None:
    """Print a value as indented JSON."""
    print(json.dumps(value, indent=2))


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Write a file that an option names, inside. Raises UsageError, with the option, the path and the reason."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{option}: {path} cannot be written: {error.strerror or error}.") from error


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table whose last column wraps: by rich to a terminal, as plain text to a pipe.

    Args:
        columns: the names in the header; none prints no header.
    """
    if sys.stdout.isatty():
        _print_rich(columns, rows)
    else:
        width = get_terminal_size(fallback=(WIDTH_WHEN_PIPED, 24)).columns
        print("\n".join(layout(columns, rows, width)))


def layout(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """Yield the lines of a table. The last column wraps at ``width``, all others keep the width they need."""
    table = [columns, *rows] if columns else rows
    widths = _widths(table)
    indent = sum(widths) + 2 * len(widths)
    for row in table:
        head = "".join(f"{cell:{size}}  " for cell, size in zip(row[:-1], widths, strict=True))
        lines = wrap(row[-1], max(width - indent, LEAST_LAST_COLUMN), break_long_words=False, break_on_hyphens=False)
        yield f"{head}{lines[0] if lines else ''}".rstrip()
        yield from (" " * indent + line for line in lines[1:])


def _widths(table: Sequence[Sequence[str]]) -> list[int]:
    """The width that each column but the last needs."""
    return [max(map(len, column)) for column in list(zip(*table, strict=True))[:-1]]


def _print_rich(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_header=bool(columns))
    widths = _widths([columns, *rows] if columns else rows)
    for name, width in zip(columns or widths, widths, strict=False):
        table.add_column(str(name), no_wrap=True, min_width=width)
    table.add_column(columns[-1] if columns else "", overflow="fold", min_width=LEAST_LAST_COLUMN)
    for row in rows:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    Console(highlight=False).print(table)


_STYLES = {"sync": "green", "audit": "yellow", "off": "red", "broken": "red", "disabled": "yellow"}


def setting_json(setting: Setting[Any]) -> dict[str, Any]:
    """Return a setting with its origin and what was rejected, as JSON can hold it."""
    rejected = [{"value": value, "why": why} for value, why in setting.rejected]
    return {"value": setting.value, "origin": setting.origin, "rejected": rejected}


def setting_row(name: str, setting: Setting[Any]) -> tuple[str, str, str]:
    """Return a setting as a row: name, value, and origin with what was rejected."""
    value = {True: "on", False: "off"}.get(setting.value, str(setting.value))
    rejected = "; ".join(f"{other} rejected: {why}" for other, why in setting.rejected)
    return name, value, f"{setting.origin} ({rejected})" if rejected else setting.origin
