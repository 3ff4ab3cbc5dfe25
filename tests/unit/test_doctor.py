"""The doctor's verdicts on recordings that are made by hand, call by call."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specsync_core.diagnostics import Recorder, RecordingError, diagnose, recording_path
from specsync_core.diagnostics import recording as fmt
from specsync_core.diagnostics import verdict as words
from specsync_core.registry_files import builtin_registry, merge_registries

REGISTRY = merge_registries([builtin_registry()])
MEM, DRAFT, ACCEPT, TARGET = (REGISTRY.site(number) for number in (1, 2, 8, 11))
STILL_RUNNING = None


class Group:
    """Recorders of a whole group; each method is one act of every rank, or of the ranks that are named."""

    def __init__(self, directory, world_size=2, slots=256, **changes):
        self.directory = directory
        self.recorders = {
            rank: Recorder(
                recording_path(directory, rank),
                group_rank=rank,
                world_size=world_size,
                ranks=range(world_size),
                plan_digest="d1",
                sites=REGISTRY.sites,
                slots=slots,
                **changes,
            )
            for rank in range(world_size)
        }

    def call(self, site, step, before, after=None):
        """``before`` and ``after``: by rank, the values of the site's tensors. No ``after``: it stays ``before``."""
        after = before if after is None else after
        for rank, values in before.items():
            self.recorders[rank].before(site, [torch.tensor(value) for value in values], step)
            if rank in after:
                self.recorders[rank].after(site, [torch.tensor(value) for value in after[rank]], step)

    def same(self, site, step, values, ranks=None):
        self.call(site, step, dict.fromkeys(ranks or self.recorders, values))

    def collective(self, what, detail="", ranks=None):
        for rank in ranks or self.recorders:
            with self.recorders[rank].waiting(what, detail):
                pass

    def close(self, *ranks):
        for rank in ranks or self.recorders:
            self.recorders[rank].close()

    def diagnose(self, *exit_codes, **options):
        return diagnose(self.directory, dict(enumerate(exit_codes)) if exit_codes else None, **options)


def triple(*correct_lens):
    return [list(correct_lens), [70 + n for n in range(len(correct_lens))], [0] * len(correct_lens)]


def healthy_steps(group, steps):
    for step in steps:
        group.collective("request broadcast")
        group.same(DRAFT, step, [[5 + step, 6]])
        group.collective("tp all-reduce", f"layer 0, step {step}")
        group.same(ACCEPT, step, triple(3, 1))


def says(diagnosis, *pieces):
    for piece in pieces:
        assert piece in diagnosis.text, f"{piece!r} is not in:\n{diagnosis.text}"
    return True


# --- values -------------------------------------------------------------------------------------------


def test_drift_then_hang(tmp_path):
    """The demo's story: rank 1 accepts one more, its batch goes on without it, and the collectives no longer match."""
    group = Group(tmp_path)
    healthy_steps(group, range(20))
    group.call(ACCEPT, 20, {0: triple(3, 1), 1: triple(3, 2)})
    group.recorders[0].begin_wait("tp all-reduce", "layer 1 mlp, batch 2")
    group.recorders[1].begin_wait("request broadcast")
    found = group.diagnose(STILL_RUNNING, STILL_RUNNING)
    assert found.finding == "drift-hang"
    assert found.is_finding
    assert (found.site, found.step, found.group_rank) == ("dspark-accept-greedy", 20, 1)
    assert (found.tensor, found.index, found.own, found.rank0) == ("correct_len", 1, 2, 1)
    assert found.divergence.call == 21
    assert found.divergence.equal_before is False
    assert (found.waits[0].what, found.waits[0].detail) == ("tp all-reduce", "layer 1 mlp, batch 2")
    assert found.waits[1].what == "request broadcast"
    assert found.comparisons == 20 * 4 + 3
    assert (found.dead_ranks, found.missing_ranks, found.healed) == ((), (), {})
    assert found.verdict[0] == (
        "First divergence: dspark-accept-greedy, step 20, call 21: correct_len[1] is 2 on rank 1 and 1 on rank 0."
    )
    assert says(
        found,
        "They differed before the sync too, and were not healed: the site is off, or in audit mode.",
        "Rank 0 waits in tp all-reduce (layer 1 mlp, batch 2), in step 20, since ",
        "Rank 1 waits in request broadcast, in step 20, since ",
        "These waits are not the same",
        "first differ at number 41: rank 0 entered tp all-reduce (layer 1 mlp, batch 2), rank 1 entered request",
    )
    assert "transport" not in found.text


def test_a_later_divergence_of_an_earlier_site_is_not_the_first(tmp_path):
    group = Group(tmp_path)
    group.same(DRAFT, 0, [[1]])
    group.call(ACCEPT, 0, {0: triple(3), 1: triple(4)})
    group.call(DRAFT, 1, {0: [[1]], 1: [[2]]})
    assert (group.diagnose().site, group.diagnose().step) == ("dspark-accept-greedy", 0)


def test_values_that_differ_after_the_sync_alone(tmp_path):
    group = Group(tmp_path)
    group.call(ACCEPT, 3, {0: triple(3), 1: triple(3)}, {0: triple(3), 1: triple(1)})
    group.close()
    found = group.diagnose()
    assert (found.finding, found.divergence.equal_before) == ("silent-divergence", True)
    assert says(found, "Own values were equal before the sync: something changed them after it.")


def test_silent_divergence(tmp_path):
    group = Group(tmp_path)
    group.call(TARGET, 3, {0: [[70, 71]], 1: [[70, 72]]})
    group.close()
    found = group.diagnose(0, 0)
    assert (found.finding, found.own, found.rank0, found.waits) == ("silent-divergence", 72, 71, {})
    assert found.is_finding
    assert says(found, "Nothing hangs")


def test_healed(tmp_path):
    group = Group(tmp_path)
    healthy_steps(group, range(3))
    for step in (3, 4):
        group.call(ACCEPT, step, {0: triple(3), 1: triple(4)}, {0: triple(3), 1: triple(3)})
    group.close()
    found = group.diagnose(0, 0)
    assert (found.finding, found.is_finding, found.divergence) == ("healed", False, None)
    assert found.healed == {"dspark-accept-greedy": 2}
    assert (found.site, found.step, found.own, found.rank0) == ("dspark-accept-greedy", 3, 4, 3)
    assert says(
        found,
        "Healed: dspark-accept-greedy, step 3, call 4: correct_len[0] is 4 on rank 1 and 3 on rank 0, before the",
        "Healed by the sync (calls): dspark-accept-greedy 2.",
    )


def test_healed_is_not_the_cause_of_a_later_divergence(tmp_path):
    group = Group(tmp_path)
    group.call(ACCEPT, 0, {0: triple(3), 1: triple(4)}, {0: triple(3), 1: triple(3)})
    group.call(TARGET, 1, {0: [[1]], 1: [[2]]})
    found = group.diagnose()
    assert (found.site, found.healed) == ("dspark-target", {"dspark-accept-greedy": 1})


def test_what_was_committed_is_not_guessed(tmp_path):
    """Both ranks are inside the sync: own values differ, but no committed value is known."""
    group = Group(tmp_path)
    group.call(ACCEPT, 0, {0: triple(3), 1: triple(4)}, {})
    found = group.diagnose(STILL_RUNNING, STILL_RUNNING)
    assert (found.finding, found.divergence, found.healed) == ("hang", None, {})
    assert found.waits[0].what == "sync of dspark-accept-greedy"
    assert says(found, "correct_len[0] is 4 on rank 1 and 3 on rank 0; what was committed is not recorded")
    assert "transport" not in found.text


def test_a_consensus_is_not_healing(tmp_path):
    group = Group(tmp_path)
    group.call(MEM, 0, {0: [5.5], 1: [4.5]}, {0: [4.5], 1: [4.5]})
    group.close()
    found = group.diagnose()
    assert (found.finding, found.healed, found.agreed) == ("clean", {}, {"dspark-mem": 1})
    assert says(found, "Agreed upon from different own values, as is meant (calls): dspark-mem 1.")


def test_a_consensus_that_was_not_reached_is_a_divergence(tmp_path):
    group = Group(tmp_path)
    group.call(MEM, 0, {0: [5.5], 1: [4.5]})
    found = group.diagnose()
    assert (found.site, found.tensor, found.own, found.rank0) == ("dspark-mem", "value", 4.5, 5.5)


def test_different_shapes(tmp_path):
    group = Group(tmp_path)
    group.call(TARGET, 3, {0: [[1, 2]], 1: [[1, 2, 3]]}, {})
    found = group.diagnose()
    assert (found.divergence.kind, found.divergence.phase) == ("shape", "before")
    assert (found.own, found.rank0, found.index) == ("int64 [3]", "int64 [2]", None)
    assert says(found, "next_token_ids is int64 [3] on rank 1 and int64 [2] on rank 0", "the batches differed already")


def test_different_numbers_of_tensors(tmp_path):
    group = Group(tmp_path)
    group.call(REGISTRY.site("eagle-draft"), 0, {0: [[0.5], [1], [2.0]], 1: [[0.5], [1]]})
    found = group.diagnose()
    assert found.divergence.kind == "shape"
    assert (found.own, found.rank0) == ("float32 [1], one of 2", "float32 [1], one of 3")


def test_a_difference_behind_the_kept_values(tmp_path):
    group = Group(tmp_path)
    long = list(range(100))
    group.call(TARGET, 0, {0: [long], 1: [[*long[:99], 7]]})
    found = group.diagnose()
    assert (found.finding, found.index, found.own) == ("silent-divergence", None, None)
    assert says(found, "next_token_ids differs between rank 1 and rank 0, behind the values that were kept")


def test_not_a_number_equals_itself(tmp_path):
    group = Group(tmp_path)
    group.same(MEM, 0, [float("nan")])
    group.close()
    assert group.diagnose().finding == "clean"
    group = Group(tmp_path)
    group.call(MEM, 0, {0: [float("nan")], 1: [1.0]})
    assert group.diagnose().rank0 != group.diagnose().own
    json.dumps(group.diagnose().to_dict(), allow_nan=False)


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_the_odd_one_out_of_three(tmp_path, odd):
    group = Group(tmp_path, world_size=3)
    group.call(ACCEPT, 5, {rank: triple(4 if rank == odd else 3) for rank in range(3)})
    found = group.diagnose()
    assert (found.group_rank, found.own, found.rank0) == (odd, 4, 4 if odd == 0 else 3)
    assert found.divergence.odd_ranks == (odd,)
    assert found.divergence.has_majority
    assert found.divergence.values == {rank: 4 if rank == odd else 3 for rank in range(3)}
    assert says(found, f"correct_len[0] is 4 on rank {odd}", f"(rank {odd} is the odd one out of 3 ranks)")


def test_without_a_majority_rank_0_is_the_measure(tmp_path):
    group = Group(tmp_path, world_size=3)
    group.call(ACCEPT, 5, {0: triple(1), 1: triple(2), 2: triple(3)})
    found = group.diagnose()
    assert (found.divergence.odd_ranks, found.divergence.has_majority) == ((1, 2), False)
    assert says(found, "correct_len[0] is 2 on rank 1 and 3 on rank 2 and 1 on rank 0")


# --- the path -----------------------------------------------------------------------------------------


def test_ranks_that_went_through_different_sites(tmp_path):
    group = Group(tmp_path)
    healthy_steps(group, range(2))
    group.same(DRAFT, 2, [[1]], ranks=[0])
    group.same(REGISTRY.site("dspark-graph-greedy"), 2, [[1]], ranks=[1])
    found = group.diagnose()
    assert (found.divergence.kind, found.step, found.group_rank) == ("path", 2, 1)
    assert (found.own, found.rank0) == ("dspark-graph-greedy", "dspark-draft-greedy")
    assert says(
        found,
        "First divergence: step 2: rank 0 went to dspark-draft-greedy, rank 1 went to dspark-graph-greedy.",
        "No value at a declared site differed before it",
    )


def test_a_rank_that_left_a_site_out(tmp_path):
    group = Group(tmp_path, world_size=3)
    healthy_steps(group, range(2))
    group.same(DRAFT, 2, [[1]])
    group.same(ACCEPT, 2, triple(1), ranks=[0, 2])
    group.same(DRAFT, 3, [[1]])
    found = group.diagnose()
    assert (found.divergence.kind, found.step, found.group_rank) == ("path", 2, 1)
    assert (found.site, found.own, found.rank0) == ("dspark-accept-greedy", None, "dspark-accept-greedy")
    assert says(found, "rank 1 went to no further site")


def test_a_rank_that_left_a_step_out(tmp_path):
    group = Group(tmp_path)
    for step in range(4):
        group.same(DRAFT, step, [[step]], ranks=[0] if step == 2 else None)
    found = group.diagnose()  # rank 1's third call is of another step than rank 0's: not to be compared
    assert (found.divergence.kind, found.step, found.group_rank, found.own) == ("path", 2, 1, None)


def test_a_value_before_the_ways_part_comes_first(tmp_path):
    group = Group(tmp_path)
    group.call(DRAFT, 0, {0: [[1]], 1: [[2]]})
    group.same(ACCEPT, 0, triple(1), ranks=[0])
    group.same(TARGET, 0, [[1]], ranks=[1])
    assert group.diagnose().divergence.kind == "value"


def test_being_behind_is_not_a_divergence(tmp_path):
    group = Group(tmp_path)
    healthy_steps(group, range(3))
    group.same(DRAFT, 3, [[1, 2]], ranks=[0])
    found = group.diagnose(hang_after_s=60)
    assert (found.finding, found.behind_ranks) == ("clean", ())


def test_being_behind_within_a_step_is_not_a_divergence_but_ending_there_is(tmp_path):
    group = Group(tmp_path)
    healthy_steps(group, range(3))
    group.same(DRAFT, 3, [[1, 2]], ranks=[0])
    group.same(ACCEPT, 3, triple(1), ranks=[0])
    group.same(DRAFT, 3, [[1, 2]], ranks=[1])
    assert group.diagnose().finding == "clean"
    group.close()
    assert group.diagnose().divergence.kind == "path"


# --- waits, the dead, the missing ---------------------------------------------------------------------


def test_no_divergence_points_at_the_transport(tmp_path, monkeypatch):
    versions = {"nccl": "2.28.9", "torch": "2.13.0"}
    monkeypatch.setattr("specsync_core.diagnostics.recorder.library_versions", lambda: versions)
    group = Group(tmp_path)
    healthy_steps(group, range(5))
    for recorder in group.recorders.values():
        recorder.begin_wait("tp all-reduce", "layer 0")
    found = group.diagnose(STILL_RUNNING, STILL_RUNNING)
    assert (found.finding, found.divergence) == ("hang", None)
    assert says(
        found,
        "All ranks wait in the same place.",
        "No divergence at declared sites in 20 comparisons: look at the transport (NCCL 2.28.9: ",
        "sgl-project/sglang #33289",
    )


def test_without_nccl_it_does_not_speak_of_it(tmp_path):
    group = Group(tmp_path)
    healthy_steps(group, range(1))
    group.recorders[0].begin_wait("tp all-reduce")
    assert says(group.diagnose(STILL_RUNNING, STILL_RUNNING), "look at the transport (NCCL is not loaded")


def test_a_rank_that_is_behind(tmp_path):
    group = Group(tmp_path)
    healthy_steps(group, range(5))
    group.same(DRAFT, 5, [[1]], ranks=[0])
    group.recorders[0].begin_wait("tp all-reduce")
    found = group.diagnose(STILL_RUNNING, STILL_RUNNING)
    assert (found.finding, found.behind_ranks) == ("hang", (1,))
    assert says(
        found,
        "Rank 1 is in no long wait; it last recorded the values after dspark-accept-greedy in step 4 at ",
        "Rank 1 is behind: in step 4, after 2 site calls in it; rank 0 is in step 5, after 1.",
    )


def test_a_living_rank_in_a_short_wait_does_not_hang(tmp_path):
    group = Group(tmp_path)
    healthy_steps(group, range(2))
    group.recorders[0].begin_wait("tp all-reduce")
    assert group.diagnose(hang_after_s=60).finding == "clean"
    found = group.diagnose(hang_after_s=0)
    assert found.finding == "hang"
    assert found.waits[0].seconds >= 0
    assert list(found.waits) == [0]


def test_nested_waits_name_the_innermost(tmp_path):
    group = Group(tmp_path)
    outer = group.recorders[0].begin_wait("decode step")
    with group.recorders[0].waiting("tp all-reduce"):
        assert group.diagnose(hang_after_s=0).waits[0].what == "tp all-reduce"
    assert group.diagnose(hang_after_s=0).waits[0].what == "decode step"
    group.recorders[0].end_wait(outer)
    assert group.diagnose(hang_after_s=0).waits == {}


def test_a_site_call_that_raised_is_not_waited_for(tmp_path):
    group = Group(tmp_path)
    group.call(ACCEPT, 0, {0: triple(1)}, {})
    group.same(DRAFT, 1, [[1]], ranks=[0])
    assert group.diagnose(hang_after_s=0).waits == {}


def test_a_dead_rank_by_its_exit_code(tmp_path):
    group = Group(tmp_path)
    healthy_steps(group, range(5))
    group.recorders[0].begin_wait("tp all-reduce")
    found = group.diagnose(STILL_RUNNING, -9)
    assert (found.finding, found.dead_ranks, list(found.waits)) == ("dead-rank", (1,), [0])
    assert says(
        found,
        "Rank 1 was ended by signal 9 (SIGKILL); it was in no recorded wait, and last recorded the values after",
        "Rank 0 waits in tp all-reduce",
    )
    assert "transport" not in found.text


WRITER = """
import sys, torch
from specsync_core.diagnostics import Recorder
from specsync_core.registry_files import builtin_registry, merge_registries
registry = merge_registries([builtin_registry()])
recorder = Recorder(sys.argv[1], group_rank=1, world_size=2, ranks=[0, 1], plan_digest="d1", sites=registry.sites)
recorder.before(registry.site("dspark-target"), (torch.tensor([7, 8]),), 3)
recorder.after(registry.site("dspark-target"), (torch.tensor([7, 8]),), 3)
print("written", flush=True)
sys.stdin.readline()
import os
os._exit(3)
"""


def test_a_dead_rank_by_its_process(tmp_path):
    group = Group(tmp_path)
    group.same(TARGET, 3, [[7, 8]], ranks=[0])
    group.recorders[0].begin_wait("tp all-reduce")
    command = [sys.executable, "-c", WRITER, str(recording_path(tmp_path, 1))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout.readline() == "written\n"
        alive = group.diagnose(hang_after_s=0)
        writer.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, writer.pid, os.WSTOPPED)
        halted = group.diagnose(hang_after_s=0)
        writer.send_signal(signal.SIGCONT)
        writer.stdin.close()
        os.waitid(os.P_PID, writer.pid, os.WEXITED | os.WNOWAIT)  # ended, and not reaped
        zombie = group.diagnose(hang_after_s=0)
    gone = group.diagnose(hang_after_s=0)
    assert (alive.finding, alive.dead_ranks) == ("hang", ())
    assert halted.headline == (
        f"Rank 1 (pid {writer.pid}) is stopped (SIGSTOP); no divergence was seen: 0 mismatches in 1 comparison."
    )
    assert (halted.finding, halted.endings[1]) == ("hang", "is stopped (SIGSTOP)")
    assert says(halted, f"Rank 1 is stopped (SIGSTOP): it can do nothing before `kill -CONT {writer.pid}`")
    assert "-USR1" not in halted.text
    assert "transport" not in halted.text
    assert "stopped" not in alive.text
    assert (zombie.finding, zombie.dead_ranks) == ("dead-rank", (1,))
    assert (gone.finding, gone.dead_ranks) == ("dead-rank", (1,))
    assert says(gone, "Rank 1 is gone, and did not close its recording; it was in no recorded wait")


def test_a_process_of_another_host_is_not_pronounced_dead(tmp_path, monkeypatch):
    elsewhere = {"name": "elsewhere", "boot_id": "b", "pid_namespace": "p", "process_start": "1"}
    monkeypatch.setattr("specsync_core.diagnostics.recorder.host_identity", lambda: elsewhere)
    group = Group(tmp_path)
    healthy_steps(group, range(1))
    found = group.diagnose()
    assert (found.finding, found.dead_ranks) == ("clean", ())


def test_a_rank_that_failed_by_an_exception(tmp_path):
    group = Group(tmp_path)
    healthy_steps(group, range(2))
    with pytest.raises(ValueError, match="x"), group.recorders[1]:
        raise ValueError("x")
    group.recorders[0].begin_wait("tp all-reduce")
    found = group.diagnose(STILL_RUNNING, 1)
    assert (found.finding, found.dead_ranks) == ("dead-rank", (1,))
    assert says(found, "Rank 1 failed: ValueError (exited with code 1); it was in no recorded wait")


def test_a_rank_that_gave_up_waiting_is_not_the_dead_one(tmp_path):
    group = Group(tmp_path)
    healthy_steps(group, range(2))
    with pytest.raises(RuntimeError), group.recorders[0] as recorder, recorder.waiting("tp all-reduce"):
        raise RuntimeError
    group.recorders[1].begin_wait("request broadcast")
    found = group.diagnose(1, STILL_RUNNING)
    assert (found.finding, found.dead_ranks) == ("hang", ())
    assert found.waits[0].failed == "RuntimeError"
    assert says(found, "Rank 0 entered tp all-reduce, in step 1, at ", "and left it by RuntimeError after ")


def test_ranks_that_all_ended_inside_waits_are_a_hang(tmp_path):
    group = Group(tmp_path)
    healthy_steps(group, range(2))
    group.recorders[0].begin_wait("tp all-reduce")
    group.recorders[1].begin_wait("request broadcast")
    found = group.diagnose(-9, -15)
    assert (found.finding, found.dead_ranks) == ("hang", ())
    assert says(found, "Rank 1 was ended by signal 15 (SIGTERM); it waited in request broadcast, in step 1, since ")


def test_a_rank_killed_inside_a_wait_while_another_lives(tmp_path):
    group = Group(tmp_path)
    healthy_steps(group, range(2))
    for recorder in group.recorders.values():
        recorder.begin_wait("tp all-reduce")
    assert group.diagnose(STILL_RUNNING, -9).dead_ranks == (1,)
    assert group.diagnose(STILL_RUNNING, -6).dead_ranks == (), "an abort inside a collective is the collective's own"


def test_drift_then_crash(tmp_path):
    group = Group(tmp_path)
    group.call(ACCEPT, 1, {0: triple(3), 1: triple(4)})
    group.close(0)
    found = group.diagnose(0, -11)
    assert (found.finding, found.dead_ranks) == ("drift-crash", (1,))
    assert found.verdict[0].startswith("First divergence: dspark-accept-greedy")
    assert says(found, "Rank 1 was ended by signal 11 (SIGSEGV)")


def test_a_finished_rank_that_another_waits_for(tmp_path):
    group = Group(tmp_path)
    healthy_steps(group, range(2))
    group.recorders[0].begin_wait("request broadcast")
    group.close(1)
    assert says(group.diagnose(STILL_RUNNING, 0), "Rank 1 finished.", "Rank 0 waits in request broadcast")


@pytest.mark.parametrize("missing", [0, 1])
def test_a_missing_rank_is_not_compared(tmp_path, missing):
    group = Group(tmp_path)
    healthy_steps(group, range(2))
    group.close()
    recording_path(tmp_path, missing).unlink()
    found = group.diagnose()
    assert (found.finding, found.missing_ranks, found.comparisons) == ("inconclusive", (missing,), 0)
    assert found.reference_rank == 1 - missing
    assert found.is_finding
    assert says(found, "Nothing could be compared", f"No recording of rank {missing}: nothing is known of it.")


def test_a_missing_rank_that_died(tmp_path):
    group = Group(tmp_path)
    group.recorders[0].begin_wait("tp all-reduce")
    recording_path(tmp_path, 1).unlink()
    found = group.diagnose(STILL_RUNNING, 17)
    assert (found.finding, found.dead_ranks) == ("dead-rank", (1,))
    assert says(found, "Rank 1 exited with code 17 and left no readable recording.", "do not say whether a decision")


def test_of_three_ranks_two_are_enough_to_find_it(tmp_path):
    group = Group(tmp_path, world_size=3)
    group.call(ACCEPT, 5, {0: triple(1), 1: triple(2), 2: triple(3)})
    recording_path(tmp_path, 0).unlink()
    found = group.diagnose()
    assert (found.reference_rank, found.group_rank, found.own, found.rank0) == (1, 2, 3, 2)
    assert says(found, "correct_len[0] is 3 on rank 2 and 2 on rank 1", "No recording of rank 0")


def test_no_recording_at_all(tmp_path):
    (tmp_path / "notes.txt").write_text("not a recording, and not named like one")
    found = diagnose(tmp_path)
    assert (found.finding, found.world_size, found.verdict) == ("inconclusive", 0, ())
    assert found.text == "Nothing could be compared, so nothing is said about the ranks' agreement."
    with pytest.raises(RecordingError, match="no such directory"):
        diagnose(tmp_path / "nowhere")


def test_one_rank_alone(tmp_path):
    group = Group(tmp_path, world_size=1)
    healthy_steps(group, range(2))
    group.close()
    assert (group.diagnose().finding, group.diagnose().missing_ranks) == ("inconclusive", ())


# --- what could not be seen ---------------------------------------------------------------------------


def test_a_wrapped_ring_compares_what_it_kept_and_says_so(tmp_path):
    group = Group(tmp_path, slots=64)
    group.call(ACCEPT, 0, {0: triple(3), 1: triple(4)})
    healthy_steps(group, range(1, 40))
    group.close()
    found = group.diagnose()
    assert found.finding == "clean"
    assert 0 < found.comparisons < 40 * 4
    assert says(found, "Rank 1's ring kept its last 64 records, from step ", "an earlier divergence would not be seen")


def test_rings_that_wrapped_at_different_places(tmp_path):
    """Rank 1 waits more often, so that its ring reaches less far back: no path differs for that."""
    group = Group(tmp_path, slots=64)
    for step in range(40):
        group.collective("extra", ranks=[1])
        healthy_steps(group, [step])
    group.close()
    assert group.diagnose().finding == "clean"


def tear(path, *slots):
    data = bytearray(path.read_bytes())
    ring = fmt.PREAMBLE.unpack_from(data)[4]
    for slot in slots:
        data[ring + slot * fmt.SLOT_BYTES + 30] ^= 255
    path.write_bytes(data)


def test_a_wait_whose_end_was_torn_is_not_open(tmp_path):
    group = Group(tmp_path)
    healthy_steps(group, range(2))
    tear(recording_path(tmp_path, 1), 1)
    assert fmt.read_recording(recording_path(tmp_path, 1)).records[1].sequence == 3
    assert group.diagnose(hang_after_s=0).waits == {}


def test_a_torn_record_is_no_divergence(tmp_path):
    group = Group(tmp_path)
    healthy_steps(group, range(6))
    group.close()
    tear(recording_path(tmp_path, 1), 30, 31, 32, 33)
    found = group.diagnose()
    assert found.finding == "clean"
    assert says(found, "Rank 1: 4 records could not be read (torn while they were written).")


def test_a_cut_file_says_nothing_about_waits(tmp_path):
    group = Group(tmp_path, slots=1024)
    healthy_steps(group, range(6))
    path = recording_path(tmp_path, 1)
    data = path.read_bytes()
    ring = fmt.PREAMBLE.unpack_from(data)[4]
    path.write_bytes(data[: ring + 13 * fmt.SLOT_BYTES])  # its newest record is the begin of a wait
    found = group.diagnose(hang_after_s=0)
    assert (found.waits, found.finding) == ({}, "clean")
    assert says(found, "Rank 1's file is cut off", "nothing is said about where it waits")


def test_a_damaged_header_is_named(tmp_path):
    group = Group(tmp_path)
    healthy_steps(group, range(2))
    group.close()
    path = recording_path(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:200])
    found = group.diagnose()
    assert (found.finding, found.missing_ranks) == ("inconclusive", (1,))
    assert says(found, f"Not read: {path}: the recording's header is damaged or cut off.")


def test_tensors_without_values(tmp_path):
    group = Group(tmp_path)
    for recorder in group.recorders.values():
        recorder.before(TARGET, [torch.empty(2, device="meta")], 0)
        recorder.after(TARGET, [torch.empty(2, device="meta")], 0)
        recorder.close()
    found = group.diagnose()
    assert (found.finding, found.comparisons) == ("inconclusive", 0)
    assert says(found, "Of 1 tensors the shapes alone were compared")


def test_differing_plans_and_versions(tmp_path, monkeypatch):
    for rank, nccl in enumerate(("2.28.9", "2.30.7")):
        monkeypatch.setattr("specsync_core.diagnostics.recorder.library_versions", lambda nccl=nccl: {"nccl": nccl})
        Recorder(
            recording_path(tmp_path, rank),
            group_rank=rank, world_size=2, ranks=(0, 1), plan_digest=f"d{rank}", sites=REGISTRY.sites,
        ).begin_wait("tp all-reduce")  # fmt: skip
    assert says(
        diagnose(tmp_path, {0: None, 1: None}),
        "The ranks differ in their plan digest: d0 on rank 0, d1 on rank 1.",
        "The ranks differ in their nccl version: 2.28.9 on rank 0, 2.30.7 on rank 1.",
    )


def test_recordings_of_another_run_are_left_out(tmp_path):
    older, newer = Group(tmp_path / "a", run_id="a"), Group(tmp_path / "b", run_id="b")
    older.same(TARGET, 0, [[1]])
    newer.same(TARGET, 0, [[2]])
    found = diagnose([recording_path(newer.directory, 0), recording_path(older.directory, 1)])
    assert (found.finding, found.missing_ranks) == ("inconclusive", (1,))
    assert says(found, "is of another run")


def test_recordings_of_a_group_of_another_size_are_left_out(tmp_path):
    Group(tmp_path, world_size=3).same(TARGET, 0, [[1]])
    Group(tmp_path, world_size=2).same(TARGET, 0, [[2]])
    found = diagnose(tmp_path)
    assert (found.divergence, found.world_size, found.comparisons) == (None, 2, 1)
    assert says(found, f"Left out: {recording_path(tmp_path, 2)} is of another run.")


def test_a_recording_that_ended_long_before_is_left_out(tmp_path, monkeypatch):
    older = Group(tmp_path)
    older.same(TARGET, 0, [[1]])
    later_s = time.time() + 3600
    monkeypatch.setattr("specsync_core.diagnostics.recorder.time.time", lambda: later_s)
    newer = Group(tmp_path / "newer")
    newer.same(TARGET, 0, [[2]])
    found = diagnose([recording_path(tmp_path, 1), recording_path(newer.directory, 0)])
    assert (found.divergence, found.missing_ranks) == (None, (1,))


def test_an_older_recording_of_the_same_rank_is_left_out(tmp_path):
    older, newer = Group(tmp_path / "a"), Group(tmp_path / "b")
    older.same(TARGET, 0, [[1]])
    newer.same(TARGET, 0, [[2]])
    found = diagnose([*older.directory.iterdir(), *newer.directory.iterdir()])
    assert found.divergence is None
    assert says(found, "is an older recording of rank 0", "is an older recording of rank 1")


def test_files_are_found_by_what_is_in_them(tmp_path):
    group = Group(tmp_path)
    group.call(TARGET, 0, {0: [[1]], 1: [[2]]})
    for rank in range(2):
        recording_path(tmp_path, rank).rename(tmp_path / f"renamed-{rank}.bin")
    assert group.diagnose().site == "dspark-target"


def test_a_diagnosis_is_json(tmp_path):
    group = Group(tmp_path)
    group.call(ACCEPT, 2, {0: triple(3), 1: triple(4)})
    group.recorders[1].begin_wait("tp all-reduce", "layer 1")
    document = json.loads(json.dumps(group.diagnose(STILL_RUNNING, STILL_RUNNING).to_dict(), allow_nan=False))
    assert (document["finding"], document["site"], document["step"]) == ("drift-hang", "dspark-accept-greedy", 2)
    assert (document["tensor"], document["index"], document["own"], document["rank0"]) == ("correct_len", 0, 4, 3)
    assert document["waits"]["1"]["what"] == "tp all-reduce"
    assert document["divergence"]["values"] == {"0": 3, "1": 4}
    assert document["is_finding"] is True
    assert isinstance(document["verdict"], list)


def test_small_words():
    assert words.rank_list([1]) == "rank 1"
    assert words.rank_list([0, 2]) == "ranks 0, 2"
    assert words.show(0.1) == "0.1"
    assert words.show(None) == "unknown"


# --- properties ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def equal_files(tmp_path_factory):
    """Bytes of two ranks' files of an equal run, with a ring that has wrapped, and one that has not."""
    files = {}
    for slots in (64, 512):
        directory = tmp_path_factory.mktemp("equal")
        group = Group(directory, slots=slots)
        healthy_steps(group, range(9))
        group.close()
        files[slots] = [recording_path(directory, rank).read_bytes() for rank in range(2)]
    return files


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_equal_runs_are_never_accused_however_their_files_are_cut_or_torn(equal_files, tmp_path, data):
    for rank, whole in enumerate(equal_files[data.draw(st.sampled_from([64, 512]))]):
        content = bytearray(whole)
        for place in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=12)):
            content[place] ^= 1 << data.draw(st.integers(0, 7))
        del content[data.draw(st.integers(0, len(whole)) | st.just(len(whole))) :]
        recording_path(tmp_path, rank).write_bytes(content)
    found = diagnose(tmp_path)
    assert found.divergence is None
    assert found.first_healed is None
    assert found.healed == {}
    assert found.finding in ("clean", "inconclusive")
    assert found.verdict


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.tuples(st.sampled_from([DRAFT, ACCEPT, TARGET]), st.integers(1, 20), st.booleans()), min_size=1, max_size=30
    ),
    world_size=st.integers(2, 4),
    slots=st.integers(3, 100),
)
def test_equal_values_are_never_accused(tmp_path_factory, steps, world_size, slots):
    group = Group(tmp_path_factory.mktemp("equal"), world_size, slots)
    for step, (site, size, is_waited) in enumerate(steps):
        group.same(site, step // 2, [list(range(step, step + size)) for _ in site.tensors])
        if is_waited:
            group.collective("tp all-reduce", str(step))
    assert group.diagnose().divergence is None
    assert group.diagnose().healed == {}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    place=st.integers(0, 19),
    index=st.integers(0, 4),
    odd=st.integers(0, 2),
    world_size=st.integers(2, 3),
    tensor=st.integers(0, 2),
)
def test_one_changed_value_is_always_found(tmp_path_factory, place, index, odd, world_size, tensor):
    odd %= world_size
    group = Group(tmp_path_factory.mktemp("changed"), world_size)
    for step in range(20):
        values = {rank: [[step] * 5 for _ in range(3)] for rank in range(world_size)}
        if step >= place:
            values[odd][tensor][index] += 1000
        group.call(ACCEPT, step, values)
    found = group.diagnose()
    assert (found.step, found.index, found.tensor) == (place, index, ACCEPT.tensors[tensor].name)
    assert found.group_rank == (odd if world_size == 3 else 1)
    assert {found.own, found.rank0} == ({place, place + 1000} if found.group_rank else {place + 1000})


def test_the_test_process_is_the_writer(tmp_path):
    """Every 'running' above rests on this."""
    group = Group(tmp_path)
    assert fmt.read_recording(recording_path(tmp_path, 0)).header.pid == os.getpid()
    group.close()
