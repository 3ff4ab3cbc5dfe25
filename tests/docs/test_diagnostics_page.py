"""docs/diagnostics.md: its blocks run, its faults parse, and what it says of the doctor's words the doctor can say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from specsync_core import load_registry
from specsync_core.diagnostics import headline, parse_faults
from specsync_core.settings import VARIABLES
from specsync_core.testing import run_ranks

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "diagnostics.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)


def blocks(language: str) -> list[str]:
    return [text for name, text in BLOCKS if name == language]


def run_the_snippets(rank: int, world_size: int, snippets: list[str]) -> bool:
    names: dict[str, object] = {"seq_lens": torch.tensor([3, 4])}
    for snippet in snippets:
        exec(compile(snippet, "docs/diagnostics.md", "exec"), names)
    return bool(names["found"])


def test_the_snippets_run() -> None:
    assert len(blocks("python")) == 2
    assert run_ranks(run_the_snippets, 2, args=(blocks("python"),)) == [True, True]


def test_the_faults_parse() -> None:
    [faults] = blocks("text")
    assert len(parse_faults(faults.replace("\n", ";"), load_registry(), "docs")) == 4


def test_the_variables_are_read() -> None:
    assert set(re.findall(r"SPECSYNC_[A-Z_]+", PAGE)) <= set(VARIABLES)


ROWS = re.findall(r"^\| (`.+?) \|", PAGE, re.MULTILINE)
FIRST_LINES = [re.findall(r"`(.+?)`", row)[0] for row in ROWS]
EXAMPLES = re.compile(r"Rank 1|\(pid 4711\)|rank 1|SITE|ended| at |step N|code 3|nccl version|61,440|0 mismatches")
"""What stands for something else in another case, and a word that the sources join elsewhere."""


@pytest.mark.parametrize("line", FIRST_LINES)
def test_the_doctor_can_say_so(line: str) -> None:
    """The longest stretch of a line that holds no example is in the doctor's source."""
    folder = Path(headline.__file__).parent
    names = "headline", "environment", "verdict", "../liveness"
    source = "".join((folder / f"{name}.py").read_text() for name in names)
    stretch = max(EXAMPLES.split(line), key=len).strip(" :,")
    assert stretch in re.sub(r"\{[^{}]*\}", "", source) + source, stretch


def test_the_table_is_there() -> None:
    assert len(FIRST_LINES) == 11
