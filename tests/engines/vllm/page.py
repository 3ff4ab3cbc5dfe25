"""Write the generated parts of docs/vllm.md, from the runs that `make test-engines` kept and from benchmarks/results.

python -m tests.engines.vllm.page
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tests.engines.vllm.environment import ROOT
from tests.engines.vllm.matrix import results_path

PAGE = ROOT / "docs" / "vllm.md"
RESULTS = ROOT / "benchmarks" / "results"
NO_RUN = "-"


def matrix(kept: Sequence[dict[str, Any]]) -> list[str]:
    """One row for each setup and round, audit and sync side by side."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for run in kept:
        for found in run["rounds"]:
            cells.setdefault((run["setup"], found["fault"]), {})[run["policy"]] = _cell(found, run["policy"])
    return [
        "| setup | round | without sync (audit) | with sync |",
        "| --- | --- | --- | --- |",
        *(
            f"| {setup} | {fault or 'no fault'} | {cell.get('off', cell.get('all:audit', NO_RUN))}"
            f" | {cell.get('all', NO_RUN)} |"
            for (setup, fault), cell in cells.items()
        ),
    ]


def _cell(found: dict[str, Any], policy: str) -> str:
    if found.get("hung"):
        return "**hang**"
    if found.get("died"):
        return "**the engine dies**"
    text = f"{found['differing']} of {found['steps']} steps"
    if count := found["decisions"]:
        text += f", {count} {'decision' if count == 1 else 'decisions'} {'healed' if policy == 'all' else 'apart'}"
    if found["fault"] and "T=" not in found["fault"]:
        text += ", same text" if found["same"] else ", **wrong text**"
    return text


def serve(kept: dict[str, list[str]]) -> list[str]:
    """What `vllm serve` and its ``/metrics`` said."""
    counts = sorted(line for line in kept["counters"] if "_created" not in line)
    return [
        *("```text", *kept["start"], *kept["proof"], "```", ""),
        *("```console", "$ curl -s localhost:8000/metrics | grep ^specsync_", *counts, "```"),
    ]


def overhead(kept: dict[str, Any]) -> list[str]:
    """A decode step under each policy, and tokens per second."""
    rows = [
        "| setup | policy | ms a decode step, median | runs | off / policy | tokens/s |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, policies in kept["decode_ms"].items():
        off = policies["off"]["median"]
        rows += [
            f"| {name} | `{policy}` | {found['median']:.2f} | {', '.join(f'{run:.2f}' for run in found['runs'])}"
            f" | {off / found['median']:.3f} | {kept['tokens_per_s'][name][policy]['median']:.0f} |"
            for policy, found in policies.items()
        ]
    return rows


def leading(kept: dict[str, Any]) -> list[str]:
    """What looking drafts up on the host took on each rank."""
    rows = [
        "| setup | policy | group rank 0 | group rank 1 |",
        "| --- | --- | --- | --- |",
    ]
    for name, policies in kept["lookup_us_per_step"].items():
        rows += [
            f"| {name} | `{policy}` | {' | '.join(f'{us:.0f} us' for us in ranks)} |"
            for policy, ranks in policies.items()
        ]
    return rows


def write(page: str, name: str, lines: Sequence[str]) -> str:
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = page.split(begin)
    _, after = rest.split(end)
    return "\n".join((f"{before}{begin}", "", *lines, "", f"{end}{after}"))


def main() -> None:
    page = PAGE.read_text()
    runs = {path.stem: json.loads(path.read_text()) for path in sorted(results_path().glob("*.json"))}
    served = runs.pop("serve", None)
    page = write(page, "matrix", matrix([run for run in runs.values() if not run["setup"].startswith("0.")]))
    page = write(page, "oldest", matrix([run for run in runs.values() if run["setup"].startswith("0.")]))
    if served:
        page = write(page, "serve", serve(served))
    for path in sorted(RESULTS.glob("vllm-overhead-*.json"))[-1:]:
        measured = json.loads(path.read_text())
        page = write(page, "overhead", overhead(measured))
        page = write(page, "leading", leading(measured))
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
