"""Write the table of docs/vllm.md from the runs that `make test-engines` kept.

python -m tests.engines.vllm.table
"""

from __future__ import annotations

import json
from typing import Any

from tests.engines.vllm.environment import ROOT
from tests.engines.vllm.serving import results_path

PAGE = ROOT / "docs" / "vllm.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
HEAD = (
    "| setup | round | without sync (audit) | with sync |",
    "| --- | --- | --- | --- |",
)


def rows(kept: list[dict[str, Any]]) -> list[str]:
    """One row for each setup and round, audit and sync side by side."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for run in kept:
        for found in run["rounds"]:
            cell = cells.setdefault((run["setup"], found["fault"]), {})
            cell.setdefault(run["policy"], _cell(found))
    return [
        f"| {setup} | {fault or 'no fault'} | {cell.get('all:audit', cell.get('off', '-'))} | {cell.get('all', '-')} |"
        for (setup, fault), cell in cells.items()
    ]


def _cell(found: dict[str, Any]) -> str:
    if found.get("hung"):
        return "**hang**"
    text = f"{found['differing']} of {found['steps']} steps differ"
    if found["fault"] and not found["fault"].startswith("T="):
        text += ", same text" if found["same"] else ", **wrong text**"
    return text


def main() -> None:
    kept = [json.loads(path.read_text()) for path in sorted(results_path().glob("*.json"))]
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text("\n".join((f"{before}{BEGIN}", *HEAD, *rows(kept), f"{END}{after}")))


if __name__ == "__main__":
    main()
