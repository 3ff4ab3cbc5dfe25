"""A rank's file of counts, and what is left of it when it is closed."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from pathlib import Path

import pytest
import torch

from specsync_core import Facts, ParallelGroups, SpecTpSync, load_registry, resolve_plan
from specsync_core.testing import FakeGroup, run_fake_ranks


def test_a_closed_file_holds_the_last_counts_and_lets_its_sync_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may make many: `SpecTpSync`s that nobody uses any more must not wait for its end."""
    monkeypatch.setenv("SPECSYNC_STATS_DIR", str(tmp_path))

    def member(group: FakeGroup) -> weakref.ref[SpecTpSync]:
        sync = SpecTpSync(ParallelGroups(tp=group), resolve_plan(load_registry(), {}, facts=Facts(platform="cpu")))
        sync.sync("dspark-target", torch.tensor([5 + group.rank_in_group]))
        sync.save_stats()
        return weakref.ref(sync)

    made = run_fake_ranks(member, 2)
    (path,) = tmp_path.glob("rank-1-*.json")
    content = json.loads(path.read_text())
    assert content["settled"]
    assert content["stats"]["dspark-target"]["mismatches"] == 1
    for thread in threading.enumerate():
        if thread.name == "specsync-stats":
            thread.join(5.0)
    gc.collect()
    assert [ref() for ref in made] == [None, None]
