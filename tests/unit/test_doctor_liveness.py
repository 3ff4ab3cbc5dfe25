"""What the doctor says of ranks that are gone, that left a call by an exception, or whose stacks belie their marks."""

import os

import pytest
import torch

from specsync_core.diagnostics import Recorder, diagnose, recording_path
from specsync_core.diagnostics.doctor import examine
from specsync_core.diagnostics.dump import dump_path, write_dump
from specsync_core.diagnostics.page import Report, render_page
from specsync_core.diagnostics.recording import stacks_path
from specsync_core.diagnostics.watchdog import Watchdog
from specsync_core.registry_files import builtin_registry, merge_registries

REGISTRY = merge_registries([builtin_registry()])
ACCEPT, TARGET = (REGISTRY.site(number) for number in (8, 11))
STALL = "no progress for 61.0 s inside tp all-reduce"


@pytest.fixture
def group(tmp_path):
    """Two recorders whose ranks agree on one decision."""
    given = {"world_size": 2, "ranks": range(2), "plan_digest": "d", "sites": REGISTRY.sites, "slots": 64}
    both = [Recorder(recording_path(tmp_path, rank), group_rank=rank, **given) for rank in range(2)]
    call(both, 1, 1)
    return both


def call(group, *values):
    for recorder, value in zip(group, values, strict=True):
        recorder.before(TARGET, [torch.tensor([value])], 1)
        recorder.after(TARGET, [torch.tensor([value])], 1)


def end_all(monkeypatch):
    """Whoever asks after the writers' processes now finds none."""
    monkeypatch.setattr("specsync_core.diagnostics.progress.is_alive", lambda recording: False)


def dump(recorder, reason=STALL, stack=()):
    path = dump_path(recorder.path.parent, recorder.group_rank)
    write_dump(path, recorder.read(), recorder.about, reason=reason, inside=(), stats=None, generators={})
    if stack:
        frames = ", ".join(f'"/x/{name}.py:{line} in {name}"' for line, name in enumerate(stack))
        text = path.read_text()
        begin = text.index('"MainThread (')
        bracket, end = text.index("[", begin), text.index("]", begin)
        path.write_text(f"{text[:bracket]}[{frames}{text[end:]}")
    return path


# --- hang or death --------------------------------------------------------------------------------------------


def test_ranks_that_died_at_once_do_not_hang(tmp_path, monkeypatch, group):
    """A fault's values differ, the collectives no longer match, and gloo ends both ranks at once."""
    call(group, 1, 2)
    group[0].begin_wait("tp all-reduce", "layer 0")
    with pytest.raises(RuntimeError), group[1] as recorder, recorder.waiting("tp all-reduce", "layer 0"):
        raise RuntimeError
    end_all(monkeypatch)
    found = diagnose(tmp_path)
    assert found.finding == "drift-crash"
    assert found.headline.endswith(", and the ranks died.")
    assert "All ranks waited in the same place." in found.verdict
    assert "wait in the same" not in found.text
    assert found.gone_ranks == (0, 1)


def test_one_that_still_waits_does_hang(tmp_path, monkeypatch, group):
    call(group, 1, 2)
    for recorder in group:
        recorder.begin_wait("tp all-reduce")
    found = diagnose(tmp_path, {0: None, 1: -9})
    assert (found.finding, found.headline.split(", and ")[-1]) == ("drift-hang", "the ranks hang.")


def test_a_wait_that_failed_after_long_was_a_hang(tmp_path, group):
    call(group, 1, 2)
    for recorder in group:
        with pytest.raises(RuntimeError), recorder, recorder.waiting("tp all-reduce"):
            raise RuntimeError
    assert diagnose(tmp_path, hang_after_s=0.0).finding == "drift-hang"
    assert diagnose(tmp_path, hang_after_s=5.0).finding == "drift-crash"


def test_where_stacks_differ_an_equal_mark_is_not_one_place(tmp_path, group):
    for recorder, inner in zip(group, ("broadcast", "all_reduce"), strict=True):
        recorder.begin_wait("tp all-reduce")
        dump(recorder, stack=("main", inner, "wrapper"))
    text = diagnose(tmp_path, hang_after_s=0).text
    assert "same mark, but their stacks differ (broadcast on rank 0, all_reduce on rank 1)" in text
    assert "the same place" not in text


def test_where_stacks_are_alike_it_is(tmp_path, group):
    for recorder in group:
        recorder.begin_wait("tp all-reduce")
        dump(recorder, stack=("main", "all_reduce"))
    assert "All ranks wait in the same place." in diagnose(tmp_path, hang_after_s=0).text


# --- one word on who lives, in text, JSON and page ------------------------------------------------------------


def everywhere(directory):
    found, evidence = examine(directory, hang_after_s=0)
    return found, found.text, found.to_dict(), render_page([Report("x", found, evidence)])


def test_ranks_that_were_ended_after_a_stall(tmp_path, monkeypatch, group):
    for recorder in group:
        recorder.begin_wait("tp all-reduce")
        dump(recorder)
    end_all(monkeypatch)
    found, text, data, page = everywhere(tmp_path)
    assert found.finding == "hang"
    for rank in range(2):
        ending = data["endings"][str(rank)]
        assert ending.startswith("lived in the stall, at ")
        assert f"Rank {rank} {ending}; it waited in tp all-reduce" in text
        assert ending in page
    assert (data["gone_ranks"], data["dead_ranks"]) == ([0, 1], [])
    assert "waits in" not in text


def test_a_dump_on_demand_saves_nobody(tmp_path, monkeypatch, group):
    for recorder in group:
        recorder.begin_wait("tp all-reduce")
    dump(group[0], reason="SIGUSR1")
    end_all(monkeypatch)
    _, text, data, page = everywhere(tmp_path)
    assert data["gone_ranks"] == [0, 1]
    assert text.count("is gone, and did not close its recording; it waited in") == 2
    assert page.count("<td>is gone, and did not close its recording</td>") == 2
    short = diagnose(tmp_path, hang_after_s=60)
    assert short.text.count("is gone, and did not close its recording; it waited in") == 2, "however long it waited"


def test_a_torn_dump_accuses_nobody(tmp_path, monkeypatch, group):
    for recorder in group:
        recorder.begin_wait("tp all-reduce")
        path = dump(recorder)
    path.write_text(path.read_text()[:100])
    end_all(monkeypatch)
    found, text, data, _ = everywhere(tmp_path)
    assert (found.finding, data["dead_ranks"], data["gone_ranks"]) == ("hang", [], [0, 1])
    assert "Rank 1 lived in the stall, by a dump that cannot be read, and is gone now; it waited in" in text


# --- which process to ask ---------------------------------------------------------------------------------------


def test_a_living_rank_without_a_stack_is_named_with_what_gets_one(tmp_path, group):
    for recorder in group:
        recorder.begin_wait("tp all-reduce")
    dump(group[0])
    ask = f"No stack of rank 1: `kill -USR1 {os.getpid()}` writes its dump; then ask again."
    assert ask not in diagnose(tmp_path, hang_after_s=0).verdict, "it has no handler: the signal would end it"
    stacks_path(group[1].path).touch()
    assert ask in diagnose(tmp_path, hang_after_s=0).verdict
    assert "No stack of rank 0" not in diagnose(tmp_path, hang_after_s=0).text


def test_the_watchdogs_warning_names_its_process(group, caplog):
    group[0].begin_wait("tp all-reduce")
    dog = Watchdog(group[0], 60, on_signal=False)
    try:
        group[0].moved_s -= 100
        dog._look()
    finally:
        dog.close()
    assert f"group rank 0 (pid {os.getpid()}) has made no progress for 1" in caplog.text


# --- ends -----------------------------------------------------------------------------------------------------


def test_a_rank_whose_exit_code_nobody_told_ended(tmp_path, monkeypatch, group):
    group[0].before(ACCEPT, [torch.tensor([1])] * 3, 1)
    end_all(monkeypatch)
    headline = diagnose(tmp_path).headline
    assert headline.startswith("Rank 1 ended before it came to dspark-accept-greedy in step 1 (call 1);")


def test_an_exception_out_of_a_sites_call_is_told_with_its_type(tmp_path, group):
    group[0].before(ACCEPT, [torch.tensor([1])] * 3, 1)
    group[0].failed(ACCEPT, TimeoutError("not recorded"))
    assert group[0].busy == {}
    found = diagnose(tmp_path, {0: 1, 1: 3})
    assert (found.waits[0].failed, found.dead_ranks) == ("TimeoutError", (1,))
    assert "Rank 0 entered sync of dspark-accept-greedy (call 1), in step 1, at " in found.text
    assert "and left it by TimeoutError after 0.0 s." in found.text
    assert "not recorded" not in group[0].path.read_bytes().decode(errors="replace")
    call(group, 1, 1)
    assert diagnose(tmp_path, {0: None, 1: None}).waits == {}, "it went on since"
