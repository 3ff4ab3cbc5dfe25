"""The watchdog over real gloo ranks: dumps while the main thread is stuck in a collective that never completes."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from specsync_core import ParallelGroups, SpecTpSync, TorchGroup
from specsync_core.diagnostics import diagnose, open_session
from specsync_core.diagnostics.dump import read_dump
from specsync_core.diagnostics.runs import examine_runs, runs_in
from specsync_core.errors import PolicyError, SpecSyncError
from specsync_core.testing import RankError, run_ranks


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECSYNC_DUMP_DIR", str(tmp_path / "dumps"))
    monkeypatch.setenv("SPECSYNC_WATCHDOG_S", "0.5")


def decode(session: Any, steps: int) -> None:
    for _ in range(steps):
        session.sync.sync("dspark-draft-greedy", torch.tensor([3, 4]))
        session.sync.next_step()


def hang(rank: int, world_size: int) -> None:
    """Rank 0 enters an all-reduce that rank 1 never enters: rank 1 sleeps, in no call of anything that is recorded."""
    session = open_session(ParallelGroups(tp=TorchGroup()))
    decode(session, 3)
    dist.barrier()
    if rank == 0:
        with session.waiting("tp all-reduce", "layer 3"):
            dist.all_reduce(torch.ones(4))
    time.sleep(60)


def run_folder(tmp_path: Path) -> Path:
    [folder] = runs_in(tmp_path / "dumps")
    return folder


def test_every_rank_that_lives_dumps_while_one_is_stuck_in_a_native_collective(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"ranks \[0, 1\] of 2 did not finish"):
        run_ranks(hang, 2, timeout_s=4.0, group_timeout_s=60.0)
    folder = run_folder(tmp_path)
    stuck, peer = (read_dump(folder / f"rank-{rank:04d}.dump.json") for rank in range(2))
    assert stuck.reason.startswith("no progress for ")
    assert stuck.reason.endswith(" s inside tp all-reduce")
    assert stuck.inside == ("tp all-reduce",)
    assert any("dist.all_reduce" in line or "all_reduce" in line for line in stuck.stacks_of("MainThread"))
    assert peer.reason.startswith("group rank 0 has made no progress for ")
    assert (peer.inside, peer.stats["dspark-draft-greedy"]["compared"]) == ((), 6)
    content = json.loads((folder / "rank-0000.dump.json").read_text())
    assert (content["format"], content["version"]) == ("specsync-dump", 1)
    assert set(content) - {"about"} <= set(content["about"])

    for path in folder.glob("*.specsync"):  # dumps alone are enough
        path.unlink()
    found = diagnose(folder)
    assert (found.finding, found.waits[0].what) == ("hang", "tp all-reduce")
    assert found.headline == (
        "Hang, not at a declared site (rank 0 in tp all-reduce (layer 3)); no divergence was seen:"
        " 0 mismatches in 6 checks."
    )
    assert "Rank 1's counters: 0 mismatches in 6 checks at 1 sites." in found.verdict
    assert "Rank 0's main thread, at " in found.text
    (folder / "rank-0001.dump.json").unlink()
    assert diagnose(folder).missing_ranks == (1,)


def dump_on_signal(rank: int, world_size: int) -> list[str]:
    session = open_session(ParallelGroups(tp=TorchGroup()))
    assert session.watchdog is not None
    decode(session, 2)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGUSR1)
        deadline = time.monotonic() + 10
        while not session.watchdog.path.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
    dist.barrier()
    session.close()
    dump = read_dump(session.watchdog.path) if rank == 0 else None
    return [] if dump is None else [dump.reason, *dump.stacks]


def test_a_signal_asks_for_a_dump_and_harms_nothing(tmp_path: Path) -> None:
    told, nothing = run_ranks(dump_on_signal, 2)
    assert told[0] == "SIGUSR1"
    assert "at the signal" in told
    assert nothing == []
    folder = run_folder(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == [
        "rank-0000.dump.json", "rank-0000.specsync", "rank-0001.specsync",
    ]  # fmt: skip
    found = diagnose(folder)
    assert (found.finding, found.comparisons) == ("clean", 2)
    runs, older = examine_runs(tmp_path / "dumps")
    assert ([run.path for run in runs], older) == ([folder], [])
    assert runs[0].ranks == "0, 1"


def commit_a_fault(rank: int, world_size: int) -> tuple[int, list[str]]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("specsync_core").addHandler(handler)
    session = open_session(ParallelGroups(tp=TorchGroup()))
    decode(session, 3)
    session.close()
    return session.sync.stats()["dspark-draft-greedy"].mismatches, [text for text in messages if "FAULT" in text]


def test_faults_of_the_environment_strike_and_are_loud(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECSYNC_FAULTS", "dspark-draft-greedy:rank=1:step=1:index=0:add=1")
    monkeypatch.setenv("SPECSYNC_ALLOW_FAULTS", "1")
    (healthy, silent), (mismatches, said) = run_ranks(commit_a_fault, 2)
    assert (healthy, silent, mismatches) == (0, [], 1)
    assert said == ["FAULT INJECTION IS ACTIVE on group rank 1: dspark-draft-greedy:rank=1:step=1:index=0:add=1"]
    assert diagnose(run_folder(tmp_path)).headline.startswith("Healed: dspark-draft-greedy differed on rank 1, first")


def refuse_faults(rank: int, world_size: int) -> str:
    with pytest.raises(PolicyError) as error:
        open_session(ParallelGroups(tp=TorchGroup()))
    return str(error.value)


def test_faults_are_refused_without_consent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECSYNC_FAULTS", "dspark-draft-greedy:rank=1:add=1")
    for text in run_ranks(refuse_faults, 2):
        assert "Set SPECSYNC_ALLOW_FAULTS=1" in text


def refuse_a_rank(rank: int, world_size: int) -> str:
    if rank == 1:
        os.environ.pop("SPECSYNC_FAULTS", None)  # it is refused there too: by the other rank's word
    with pytest.raises(SpecSyncError) as error:
        open_session(ParallelGroups(tp=TorchGroup()))
    return str(error.value)


def test_a_fault_for_a_rank_outside_the_group_is_refused_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECSYNC_FAULTS", "dspark-draft-greedy:rank=9:add=1")
    monkeypatch.setenv("SPECSYNC_ALLOW_FAULTS", "1")
    for text in run_ranks(refuse_a_rank, 2):
        assert "dspark-draft-greedy:rank=9:add=1: no such rank in a group of 2. Group ranks: 0 to 1" in text


def test_a_session_that_closes_names_the_faults_that_never_struck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECSYNC_FAULTS", "dspark-draft-greedy:rank=1:step=400:add=1")
    monkeypatch.setenv("SPECSYNC_ALLOW_FAULTS", "1")
    (_, silent), (_, said) = run_ranks(commit_a_fault, 2)
    assert silent == []
    assert said[1:] == [
        "A FAULT NEVER STRUCK on group rank 1: dspark-draft-greedy:rank=1:step=400:add=1: site dspark-draft-greedy was"
        " not called at such a step"
    ]


def one_records(rank: int, world_size: int) -> list[Any]:
    if rank == 1:
        del os.environ["SPECSYNC_DUMP_DIR"]
    session = open_session(ParallelGroups(tp=TorchGroup()))
    decode(session, 1)
    session.close()
    with session.waiting("something"):
        return [session.is_recording, session.watchdog is not None, len(session.step_hooks("a.b.c"))]


def test_ranks_need_not_all_record(tmp_path: Path) -> None:
    assert run_ranks(one_records, 2) == [[True, True, 1], [False, False, 0]]
    assert [path.name for path in run_folder(tmp_path).iterdir()] == ["rank-0000.specsync"]


def check_states(rank: int, world_size: int) -> tuple[int, dict[str, Any]]:
    read = []
    if rank:
        os.environ["SPECSYNC_CHECK_EVERY"] = "1"  # group rank 0's word counts: else the ranks would not meet
    session = open_session(ParallelGroups(tp=TorchGroup()))

    def state() -> dict[str, Any]:
        read.append(session.sync.step)
        return {"state-request-ids": ["a", "b"], "state-seq-lens": torch.tensor([4, 7 + (rank and len(read) > 1)])}

    for _ in range(5):
        session.sync.next_step()
        session.check_state(state)
    session.close()
    return read, session.sync.stats()["state-seq-lens"].as_dict()


def test_an_engines_derived_state_is_checked_every_so_many_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPECSYNC_CHECK_EVERY", "2")
    (steps, first), (_, second) = run_ranks(check_states, 2)
    assert (steps, first["calls"], second["calls"], second["mismatches"]) == ([2, 4], 2, 2, 1)
    found = diagnose(run_folder(tmp_path))
    assert (found.finding, found.site, found.step, found.group_rank) == (
        "silent-divergence", "state-seq-lens", 4, 1,
    )  # fmt: skip
    assert (found.own, found.rank0, found.index) == (8, 7, 1)


FAULT = "dspark-target:rank=1:add=1"


def heard() -> list[str]:
    """What specsync logs in this process from now on."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("specsync").addHandler(handler)
    return messages


def hear_what_differs(rank: int, world_size: int) -> list[str]:
    messages = heard()
    if rank:
        os.environ |= {"SPECSYNC_CHECK_EVERY": "2", "SPECSYNC_FAULTS": FAULT}
        os.environ["SPECSYNC_ALLOW_FAULTS"] = "1"
    open_session(ParallelGroups(tp=TorchGroup())).close()
    return [text for text in messages if "differs between ranks" in text]


def test_what_only_one_rank_was_given_is_said() -> None:
    first, second = run_ranks(hear_what_differs, 2)
    assert first == [
        "specsync: SPECSYNC_CHECK_EVERY differs between ranks (0 on group rank 0, 2 on group rank 1): group rank 0's"
        " counts.",
        f"specsync: SPECSYNC_FAULTS differs between ranks ('' on group rank 0, '{FAULT}' on group rank 1):"
        " each rank commits those of its own environment alone.",
    ]
    assert second == []


def make_it_directly(rank: int, world_size: int) -> list[str]:
    messages = heard()
    SpecTpSync(ParallelGroups(tp=TorchGroup()))
    return [text for text in messages if "no effect" in text]


def test_a_setting_without_effect_is_not_dropped_in_silence() -> None:
    for [text] in run_ranks(make_it_directly, 2):
        assert text.startswith("SPECSYNC_DUMP_DIR: no effect on a SpecTpSync that is made directly")
