"""Dumps: what they keep, what readers refuse, and what the doctor makes of them."""

import json

import pytest
import torch

from specsync_core.diagnostics import Recorder, diagnose, recording_path
from specsync_core.diagnostics.dump import VERSION, dump_path, in_words, python_stacks, read_dump, write_dump
from specsync_core.diagnostics.recording import RecordingError, read_recording
from specsync_core.diagnostics.watchdog import Watchdog
from specsync_core.registry_files import builtin_registry, merge_registries

REGISTRY = merge_registries([builtin_registry()])
DRAFT, ACCEPT, NGRAM = (
    REGISTRY.site(slug) for slug in ("dspark-draft-greedy", "dspark-accept-greedy", "eagle-ngram-draft")
)
FIRST = {"step": 7, "call": 8, "group_rank": 1, "tensor": "draft_tokens", "index": [2], "own": 5, "rank0": 9}


def recorder_of(folder, rank=0, **changes):
    given = {"group_rank": rank, "world_size": 2, "ranks": (4, 5), "plan_digest": "d", "sites": REGISTRY.sites}
    return Recorder(recording_path(folder, rank), **{**given, "slots": 64, "run_id": "r", **changes})


def dump_of(recorder, **changes):
    path = dump_path(recorder.path.parent, recorder.group_rank)
    given = {"reason": "a test", "inside": ("x",), "stats": None, "generators": {}}
    write_dump(path, recorder.read(), recorder.about, **{**given, **changes})
    return path


def stats(mode, mismatches=0, compared=61_440, first=None):
    counts = {"calls": 40, "bytes": 8, "compared": compared, "mismatches": mismatches, "mismatched_calls": mismatches}
    return {"dspark-draft-greedy": {"mode": mode, **counts, "first_divergence": first}}


def test_a_dump_holds_what_the_recording_holds(tmp_path):
    recorder = recorder_of(tmp_path)
    recorder.before(ACCEPT, [torch.tensor([1, 2]), torch.tensor([7, 8]), torch.tensor([0, 0])], 3)
    recorder.after(ACCEPT, [torch.tensor([1, 2]), torch.tensor([7, 8]), torch.tensor([0, 0])], 3)
    recorder.before(DRAFT, [torch.tensor([float("nan")])], 3)
    recorder.skipped(DRAFT)
    recorder.after(DRAFT, [torch.tensor([True])], 3)
    recorder.begin_wait("tp all-reduce", "layer 1")
    assert recorder.busy == {1: "tp all-reduce"}
    dump = read_dump(dump_of(recorder))
    ring = read_recording(recorder.path)
    assert dump.recording.records == ring.records
    assert dump.recording.header == ring.header
    assert [record.skipped for record in ring.records if record.kind == "after"] == [False] * 3 + [True]
    assert in_words(ring, ring.records[0]) == "before dspark-accept-greedy, call 1, step 3"
    assert in_words(ring, ring.records[-1]) == "wait-begin 1, step 3: tp all-reduce layer 1"
    assert (dump.reason, dump.inside, dump.stacks_of("MainThread")[-1].split(" in ")[1]) == (
        "a test", ("x",), "python_stacks",
    )  # fmt: skip


def test_a_dump_is_bounded_by_the_ring_and_says_what_it_lost(tmp_path):
    recorder = recorder_of(tmp_path)
    for step in range(1000):
        recorder.after(DRAFT, [torch.arange(500)], step)
    content = json.loads(dump_of(recorder).read_text())
    assert (len(content["records"]), content["dropped_records"]) == (64, 936)
    assert content["last"] == "after dspark-draft-greedy, call 0, step 999"
    assert dump_of(recorder).stat().st_size < 64 * 512 + 40_000


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        (lambda content: "{", "not a dump, or cut off"),
        (lambda content: "[]", "not a dump"),
        (lambda content: json.dumps({**content, "format": "other"}), "not a dump"),
        (lambda content: json.dumps({**content, "version": VERSION + 1}), f"this specsync reads version {VERSION}"),
        (lambda content: json.dumps({**content, "records": [[1]]}), "does not hold what it should"),
        (lambda content: json.dumps({**content, "records": [["x"] * 16]}), "does not hold what it should"),
        (lambda content: json.dumps({**content, "header": None}), "does not hold what it should"),
        (lambda content: json.dumps({**content, "header": {**content["header"], "world_size": 10**9}}), "group rank 0"),
    ],
)
def test_other_files_are_refused_and_named(tmp_path, change, hint):
    path = dump_of(recorder_of(tmp_path))
    path.write_text(change(json.loads(path.read_text())))
    with pytest.raises(RecordingError, match=hint):
        read_dump(path)
    recording_path(tmp_path, 0).unlink()
    assert f"Not read: {path}" in diagnose(tmp_path).text
    with pytest.raises(RecordingError, match="cannot be read"):
        read_dump(tmp_path / "absent.dump.json")


def test_drafts_that_copy_prompts_are_kept_only_where_asked(tmp_path):
    for asked, kept in ((False, ()), (True, (83, 69))):
        recorder = recorder_of(tmp_path / str(asked), prompts=asked)
        recorder.before(NGRAM, [torch.tensor([83, 69])], 0)
        [record] = recorder.read().records
        assert (record.values, record.crc32 > 0, record.numel) == (kept, True, 2)


def test_stacks_name_functions_and_hold_no_values():
    secret = "the prompt"  # noqa: F841 - a local that must not show
    [main] = [frames for name, frames in python_stacks().items() if name.startswith("MainThread (")]
    assert any("test_stacks_name_functions" in frame for frame in main)
    assert "the prompt" not in json.dumps(python_stacks())


# --- the counters in them -------------------------------------------------------------------------------


def both_ranks(folder, own_stats, **changes):
    for rank in range(2):
        recorder = recorder_of(folder, rank)
        dump_of(recorder, stats=own_stats if rank else stats("audit", compared=0), **changes)
        recorder.close()


def test_a_clean_audit_says_how_much_it_checked(tmp_path):
    both_ranks(tmp_path, stats("audit"))
    found = diagnose(tmp_path)
    assert (found.finding, found.checks, found.is_finding) == ("clean", 61_440, False)
    assert found.headline == "No divergence: 0 mismatches in 61,440 checks at declared sites."


def test_counters_name_what_a_recording_without_values_cannot(tmp_path):
    """On a GPU the ring holds shapes; the divergence is in the counters."""
    both_ranks(tmp_path, stats("audit", 3, first={**FIRST, "logit_gap": 0.001}))
    found = diagnose(tmp_path)
    assert (found.finding, found.site, found.step, found.group_rank) == (
        "silent-divergence", "dspark-draft-greedy", 7, 1,
    )  # fmt: skip
    assert found.headline.startswith(
        "Rank 1 decided differently at dspark-draft-greedy in step 7 (draft_tokens[2]: 5, and 9 on rank 0); nothing"
    )
    assert "(its two best logits there are 0.001 apart: near a tie, rounding decides)" in found.text
    assert "3 mismatches in 61,440 checks, first in step 7, call 8: draft_tokens[2] is 5 on rank 1" in found.text


def test_what_the_counters_saw_healed_is_no_finding(tmp_path):
    both_ranks(tmp_path, stats("sync", 3, first=FIRST))
    found = diagnose(tmp_path)
    assert (found.finding, found.is_finding, found.divergence) == ("healed", False, None)
    assert "Healed: dspark-draft-greedy differed on rank 1, first in step 7" in found.headline


@pytest.mark.parametrize(
    "odd",
    [
        {"dspark-draft-greedy": 3},
        {"dspark-draft-greedy": {"calls": "many"}},
        {"dspark-draft-greedy": {"mode": "audit", "compared": 1, "first_divergence": {"step": None}}},
        {"dspark-draft-greedy": {"mode": "audit", "compared": 1, "first_divergence": [1]}},
    ],
)
def test_counters_of_another_shape_are_left_out(tmp_path, odd):
    both_ranks(tmp_path, odd)
    assert diagnose(tmp_path).divergence is None


def test_a_stall_that_is_over_is_told(tmp_path):
    recorder = recorder_of(tmp_path)
    recorder.begin_wait("tp all-reduce")
    dump_of(recorder, reason="no progress for 61.0 s inside tp all-reduce")
    recorder.end_wait(1)
    recorder.close()
    assert "and went on since: no progress for 61.0 s inside tp all-reduce." in diagnose(tmp_path).text


# --- the watchdog's own rules ----------------------------------------------------------------------------


def test_a_rank_that_is_inside_of_nothing_is_idle_and_not_stuck(tmp_path):
    told = []
    recorder = recorder_of(tmp_path)
    dog = Watchdog(recorder, 0.05, tell=told.append, on_signal=False)
    try:
        recorder.moved_s -= 10
        dog._look()
        assert not dog.path.exists()
        recorder.begin_wait("engine step")
        recorder.moved_s -= 10
        dog._look()
        assert dog.path.exists()
        dog.path.unlink()
        dog._look()
        assert not dog.path.exists(), "one dump a stall"
    finally:
        dog.close()
    assert len(told) == 1
    assert "inside engine step" in told[0]


def test_counters_that_do_not_answer_do_not_keep_the_dump(tmp_path, monkeypatch):
    monkeypatch.setattr("specsync_core.diagnostics.watchdog.STATS_S", 0.05)

    def never():
        import time

        time.sleep(5)
        return {}

    recorder = recorder_of(tmp_path)
    dog = Watchdog(recorder, 60, stats=never, on_signal=False)
    try:
        dog._write("a test")
    finally:
        dog.close()
    assert read_dump(dog.path).stats is None


def test_a_full_disk_ends_no_watchdog(tmp_path, monkeypatch, caplog):
    recorder = recorder_of(tmp_path)
    monkeypatch.setattr("specsync_core.diagnostics.watchdog.write_dump", _full)
    dog = Watchdog(recorder, 60, on_signal=False)
    dog.ask("a test")
    while "no dump could be written" not in caplog.text:
        assert dog._thread.is_alive()
    dog.close()


def _full(*_, **__):
    raise OSError(28, "No space left on device")
