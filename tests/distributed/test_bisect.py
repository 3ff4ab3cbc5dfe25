"""What ranks leave for `specsync bisect`, and the whole of it on the demo's engine with an injected fault."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from specsync_core import ParallelGroups, SpecTpSync, TorchGroup, load_registry, resolve_plan
from specsync_core.bisect.evidence import read_evidence
from specsync_core.stats_file import INTERVAL_S
from specsync_core.testing import run_ranks

ACCEPT, PLAN, LEAD = "dspark-accept-greedy", "dspark-plan", "vllm-draft-lead"


def make_sync(sites: str) -> SpecTpSync:
    return SpecTpSync(ParallelGroups(tp=TorchGroup()), resolve_plan(load_registry(), {"SPECSYNC_SITES": sites}))


def diverge(rank: int, world_size: int, folder: str, sites: str, end: str) -> None:
    """Ranks differ at the plan in step 2, and before, in step 1, at the accept; a leader's value in step 0."""
    os.environ["SPECSYNC_STATS_DIR"] = folder
    sync = make_sync(sites)
    sync.lead(LEAD, lambda: rank)
    sync.next_step()
    sync.sync(ACCEPT, torch.tensor([1 + rank]), torch.tensor([7]), torch.tensor([0]))
    sync.next_step()
    sync.sync(PLAN, torch.tensor([3, 4 + rank], dtype=torch.int32))
    sync.sync("dspark-target", torch.tensor([5]))
    if end == "save":
        sync.save_stats()
    elif rank == 0 or end == "wait":
        time.sleep(6 * INTERVAL_S)
    else:
        time.sleep(4 * INTERVAL_S)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("end", ["save", "wait", "kill"])
def test_counts_are_evidence_however_the_ranks_end(tmp_path: Path, end: str) -> None:
    began_s = time.time()
    run_ranks(diverge, 2, args=(str(tmp_path), "all", end), lost=[1] if end == "kill" else ())
    evidence = read_evidence(tmp_path, load_registry().sites, began_s)
    counts = evidence.counts
    assert counts is not None
    assert counts.differed == (ACCEPT, PLAN)
    assert counts.checks == {ACCEPT: 3, PLAN: 2, "dspark-target": 1, LEAD: 0}
    assert counts.mismatches == {ACCEPT: 1, PLAN: 1}
    assert (counts.complete, counts.ranks, evidence.world_size) == (True, 2, 2)
    assert counts.first_call_s is not None
    assert 0 < counts.first_call_s < 120
    assert counts.is_silent("dspark-target")
    assert not counts.is_silent(LEAD)  # one rank alone had a value: nothing was compared
    assert counts.is_silent("dspark-mem")  # never called
    assert evidence.modes[PLAN] == {"sync"}


def test_in_audit_a_leaders_value_is_compared_too(tmp_path: Path) -> None:
    run_ranks(diverge, 2, args=(str(tmp_path), "all:audit", "save"))
    counts = read_evidence(tmp_path, load_registry().sites, 0.0).counts
    assert counts is not None
    assert counts.differed[0] == LEAD


def test_with_every_site_off_the_ranks_have_met_all_the_same(tmp_path: Path) -> None:
    run_ranks(diverge, 2, args=(str(tmp_path), "off", "save"))
    evidence = read_evidence(tmp_path, load_registry().sites, 0.0)
    assert evidence.has_met
    assert evidence.counts is not None
    assert evidence.counts.first_call_s is None
    assert not evidence.counts.compared


def test_a_missing_rank_or_a_damaged_file_is_no_evidence(tmp_path: Path) -> None:
    run_ranks(diverge, 2, args=(str(tmp_path), "all", "save"))
    (path,) = tmp_path.glob("rank-1-*.json")
    content = json.loads(path.read_text())
    for text in ("{", "[]", json.dumps(content | {"version": 2}), json.dumps({**content, "stats": None})):
        path.write_text(text)
        counts = read_evidence(tmp_path, load_registry().sites, 0.0).counts
        assert counts is not None
        assert not counts.complete
    path.write_text(json.dumps(content | {"settled": False}))
    assert not read_evidence(tmp_path, load_registry().sites, 0.0).counts.complete  # type: ignore[union-attr]


def unwritable(rank: int, world_size: int, folder: str) -> Any:
    os.environ["SPECSYNC_STATS_DIR"] = folder
    sync = make_sync("all")
    return sync.sync("dspark-target", torch.tensor([5 + rank])).item()


def test_an_unwritable_directory_does_not_stop_the_engine(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert run_ranks(unwritable, 2, args=(str(tmp_path / "file" / "stats"),)) == [5, 5]


@pytest.mark.timeout(400)
def test_the_demos_culprit_is_found_through_the_command_line(tmp_path: Path) -> None:
    """Few runs, for real ranks cost seconds; ``benchmarks/bisect_trials.py`` has them at the full confidence."""
    specsync = [sys.executable, "-m", "specsync_core.cli"]
    demo = [*specsync, "demo", "--steps", "8", "--fault", f"{ACCEPT}:rank=1:step=2:add=1"]
    command = [*specsync, "bisect", "--sites", f"{ACCEPT},{PLAN},dspark-target", "--runs", "1", "--", *demo]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=390, check=False)
    assert done.returncode == 3, done.stderr  # found, and one run each is not sure
    assert f"With {ACCEPT} off, 1 of 1 run fails; with everything else off and it on, 0 of 2" in done.stdout
    assert "1 of these by counts: no rank differed there" in done.stdout
    assert f"ranks differed, and were healed, at {ACCEPT}" in done.stdout
    report = json.loads((tmp_path / "specsync-bisect.json").read_text())
    assert [sorted(trial["off"]) for trial in report["trials"]] == [
        [],
        sorted([ACCEPT, PLAN, "dspark-target"]),
        [ACCEPT],
        sorted([PLAN, "dspark-target"]),
    ]
    assert report["trials"][1]["detail"] == "exit code 1"
