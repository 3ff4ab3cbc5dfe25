"""The demo's story on two GPUs: NCCL ranks diverge, hang, are diagnosed, and are kept in agreement."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs here")


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "options",
    [[], ["--algorithm", "dflash"], ["--algorithm", "eagle"], ["--temperature", "1"]],
    ids=lambda options: " ".join(options) or "default",
)
@pytest.mark.parametrize("folded", [False, True], ids=["eager", "folded"])
def test_the_story_holds(options: list[str], folded: bool) -> None:
    command = [sys.executable, "-m", "specsync_core.cli", "demo", "--device", "cuda", "--json", *options]
    done = subprocess.run(command + ["--folded"] * folded, capture_output=True, text=True, timeout=220)
    assert done.returncode in (0, 1), done.stderr
    story = json.loads(done.stdout)
    lines = "\n".join(line for part in story["parts"].values() for line in (part["title"], *part["lines"]))
    assert story["held"], lines
    assert done.returncode == 0
