"""``specsync bench``"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from specsync_core.cli.output import JsonOption, UsageError, print_json, print_table, writing


def bench(
    device: Annotated[
        str | None, typer.Option(help="cuda (a GPU per rank) or cpu (gloo). Default: cuda where there are two GPUs.")
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Ranks, each a process. Default: 2.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One batch size only.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the rows into this file (needs matplotlib).")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure what a sync costs on this machine: in a graph, on the host, and in a DSpark-shaped step.

    Microseconds, the median of the slower rank's; in brackets the ratio to doing the same through the process group.
    """
    import torch

    from specsync_core.bench import gpu, host, report
    from specsync_core.testing import run_ranks

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = device or ("cuda" if gpus >= 2 else "cpu")
    if device not in ("cuda", "cpu"):
        raise UsageError(f"--device takes cuda or cpu, not {device!r}.")
    count = 2 if ranks is None else ranks
    if count < 2:
        raise UsageError(f"--ranks takes 2 or more, not {count}: one rank syncs with nobody.")
    if device == "cuda" and count > gpus:
        raise UsageError(f"--ranks {count} needs as many GPUs; there are {gpus}. Use --device cpu.")
    _check_files(out, plot)
    print(f"measuring on {count} {device} ranks, under a minute or two ...", file=sys.stderr)
    measure = gpu.measure if device == "cuda" else host.measure
    measured = run_ranks(measure, count, 500, (quick,), group_timeout_s=120)
    result = report.report(measured, "graph" if device == "cuda" else "host")
    if as_json:
        print_json(result)
    else:
        print_table(*report.table(result))
        print(f"{result['machine']}, torch {result['torch']}, {result['date']}", file=sys.stderr)
    if out is not None:
        with writing("--out", out):
            out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if plot is not None:
        with writing("--plot", plot):
            report.plot(result, plot)


def _check_files(out: Path | None, plot: Path | None) -> None:
    """Refuse what cannot be written before anything is measured. Raises UsageError."""
    for option, path in (("--out", out), ("--plot", plot)):
        if path is None:
            continue
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise UsageError(f"{option}: {path} cannot be written: give a file in a directory that exists.")
        if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
            raise UsageError(f"{option}: {path} cannot be written: permission denied.")
    if plot is not None:
        _check_picture(plot)


def _check_picture(plot: Path) -> None:
    try:
        from matplotlib.backend_bases import FigureCanvasBase  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        raise UsageError(f"--plot needs matplotlib: {error}. pip install matplotlib") from error
    known = FigureCanvasBase.get_supported_filetypes()
    if plot.suffix[1:].lower() not in known:
        raise UsageError(f"--plot: {plot}: unknown kind of picture. Known: .{', .'.join(sorted(known))}.")
