"""From measured microseconds to a table, JSON and a plot."""

from __future__ import annotations

import datetime
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = Mapping[str, Mapping[int, float]]

TITLES: dict[str, tuple[str, str | None]] = {
    "floor": ("floor: an elementwise kernel", None),
    "pg 1": ("one broadcast, process group", "pg 1"),
    "nccl 1": ("one broadcast, NCCL called directly", "pg 1"),
    "one-shot 1": ("one-shot, one tensor", "pg 1"),
    "one-shot counting 1": ("one-shot, one tensor, counting", "pg 1"),
    "pg 3": ("three broadcasts, process group", "pg 3"),
    "nccl one by one 3": ("three broadcasts, NCCL called directly", "pg 3"),
    "nccl 3": ("three tensors, one NCCL group call", "pg 3"),
    "grouped 3": ("three tensors, process group coalescing", "pg 3"),
    "one-shot 3": ("one-shot, three tensors", "pg 3"),
    "one-shot counting 3": ("one-shot, three tensors, counting", "pg 3"),
    "pg ping-pong": ("one way of a ping-pong, process group", "pg ping-pong"),
    "one-shot ping-pong": ("one way of a ping-pong, one-shot", "pg ping-pong"),
    "signal 1": ("torch symmetric memory, copy and signal, both ways", "pg 1"),
    "step none": ("DSpark-shaped step, no sync", None),
    "cost pg": ("its sync cost: process group, one tensor at a time", "cost pg"),
    "cost grouped": ("its sync cost: grouped", "cost pg"),
    "cost one-shot": ("its sync cost: one-shot, counting", "cost pg"),
    "cost floor": ("its cost, were each sync a kernel that does nothing", "cost pg"),
    "cost one-shot draw": ("its sync cost: one-shot with fused draws, counting", "cost pg"),
    "cost over fast draw": ("the same, against a step that draws by that kernel and does not sync", "cost pg"),
    "gloo 1": ("one broadcast, gloo", "gloo 1"),
    "gloo group 1": ("one tensor, group", "gloo 1"),
    "gloo grouped 1": ("one tensor, grouped", "gloo 1"),
    "gloo 3": ("three broadcasts, gloo", "gloo 3"),
    "gloo group 3": ("three tensors, group", "gloo 3"),
    "gloo grouped 3": ("three tensors, grouped", "gloo 3"),
}
"""By key: what is shown, and the row that it is compared with."""


def slowest(ranks: Sequence[Rows]) -> dict[str, dict[int, float]]:
    """The slower rank's figure, row by row."""
    return {key: {batch: max(rank[key][batch] for rank in ranks) for batch in ranks[0][key]} for key in ranks[0]}


def report(ranks: Sequence[Rows], where: str) -> dict[str, Any]:
    """Everything of one run, as JSON can hold it. ``where`` is ``graph`` or ``host``: what rows without a word mean."""
    rows = slowest(ranks)
    shown: list[dict[str, Any]] = []
    for key, by_batch in rows.items():
        base = key.removeprefix("host ")
        if base not in TITLES:
            continue
        title, baseline = TITLES[base]
        if baseline is not None and key.startswith("host "):
            baseline = f"host {baseline}"
        measured = "host" if key.startswith("host ") else where
        ratios = {batch: us / rows[baseline][batch] for batch, us in by_batch.items()} if baseline in rows else {}
        shown.append({"key": key, "what": title, "time": measured, "us": by_batch, "ratio": ratios, "to": baseline})
    order = list(TITLES)
    shown.sort(key=lambda row: (row["time"] != where, order.index(row["key"].removeprefix("host "))))
    return {"schema": 1, **machine(), "ranks": len(ranks), "rows": shown}


def machine() -> dict[str, Any]:
    """Date, machine, versions and commit."""
    import torch

    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": _commit(),
    }
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        found |= {"machine": f"{len(names)} x {names[0]}", "nccl": ".".join(map(str, torch.cuda.nccl.version()))}  # type: ignore[no-untyped-call]
    else:
        found["machine"] = f"{platform.processor() or platform.machine()}, CPU"
    return found


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def table(result: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the table that people read: microseconds, and the ratio in brackets."""
    batches = sorted({batch for row in result["rows"] for batch in row["us"]})
    columns = ["time", *(f"bs={batch}" for batch in batches), "what"]
    rows = [[row["time"], *(_cell(row, batch) for batch in batches), row["what"]] for row in result["rows"]]
    return columns, rows


def _cell(row: Mapping[str, Any], batch: int) -> str:
    if batch not in row["us"]:
        return ""
    ratio = f" ({row['ratio'][batch]:.2f})" if batch in row["ratio"] else ""
    return f"{row['us'][batch]:.1f}{ratio}"


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draw the rows as bars, one group per batch size.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib  # type: ignore[import-not-found,import-untyped,unused-ignore]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # type: ignore[import-not-found,import-untyped,unused-ignore]

    rows = [row for row in result["rows"] if row["time"] != "host" or result["rows"][0]["time"] == "host"]
    batches = sorted({batch for row in rows for batch in row["us"]})
    figure, axes = pyplot.subplots(figsize=(10, 0.45 * len(rows) + 1.5))
    height = 0.8 / len(batches)
    for place, batch in enumerate(batches):
        at = [index + place * height for index, row in enumerate(rows) if batch in row["us"]]
        axes.barh(at, [row["us"][batch] for row in rows if batch in row["us"]], height, label=f"bs={batch}")
    axes.set_yticks([index + 0.4 - height / 2 for index in range(len(rows))], [row["what"] for row in rows])
    axes.set_xscale("symlog")
    axes.invert_yaxis()
    axes.set_xlabel(f"microseconds per call, {result['machine']}")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
