"""Recordings are made to be sent to others: they hold decisions, and never the text of a prompt."""

from __future__ import annotations

import struct
from pathlib import Path

from specsync_core.demo.config import Job, World
from specsync_core.testing import run_ranks

PROMPT = b"Zanzibar quartz: my secret prompt, 4711."


def record(rank: int, world_size: int, folder: str) -> int:
    from specsync_core.demo.worker import Rank, make_groups

    job = Job("private", "dflash", "all", steps=6, recorded=True)
    world = World(world_size, "cpu", 1, (PROMPT, PROMPT[::-1]), (job,), new_tokens=(20,))
    member = Rank(world, rank, make_groups(world, rank), Path(folder))
    return sum(map(len, member.do(job, lambda step: None).tokens.values()))


def test_recordings_hold_no_prompt_text(tmp_path: Path) -> None:
    assert min(run_ranks(record, 2, args=(str(tmp_path),))) > 10
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 2
    for path in files:
        content = path.read_bytes()
        for text in (PROMPT, PROMPT[::-1]):
            for start in range(len(text) - 7):
                part = text[start : start + 8]
                assert part not in content
                for letter in "HIQ":  # nor as token ids, whatever their width
                    assert struct.pack(f"<8{letter}", *part) not in content
