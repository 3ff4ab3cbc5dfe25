"""Live control on real ranks: sites change at the same step everywhere, or nowhere."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from specsync_core import Facts, ParallelGroups, SpecTpSync, TorchGroup, load_registry, resolve_plan
from specsync_core.control import pledges
from specsync_core.control.client import ask
from specsync_core.control.protocol import Request
from specsync_core.demo import worker
from specsync_core.demo.config import Job, ModelConfig, World
from specsync_core.diagnostics import FaultInjector, parse_faults
from specsync_core.errors import ControlError, SpecSyncError
from specsync_core.testing import run_ranks
from tests.distributed.test_engine_hooks import hook, make_engine

ACCEPT = "dspark-accept-greedy"


def synced(path: str, rank_of_control=None, **environ: str) -> SpecTpSync:
    variables = {"SPECSYNC_CONTROL": path, "SPECSYNC_TIMEOUT_S": "4", **environ}
    if rank_of_control is not None and dist.get_rank() != rank_of_control:
        del variables["SPECSYNC_CONTROL"]
    plan = resolve_plan(load_registry(), variables, facts=Facts(platform="cpu"))
    return SpecTpSync(ParallelGroups(tp=TorchGroup()), plan)


def accept(sync: SpecTpSync, rank: int) -> list[int]:
    own = torch.tensor([1, 2 + rank]), torch.tensor([5, 6]), torch.tensor([0, 0])
    sync.sync(ACCEPT, *own)
    return own[0].tolist()


class Script(threading.Thread):
    """An operator beside group rank 0: sends requests one after the other, and keeps what comes back."""

    def __init__(self, path: str, *requests: Request) -> None:
        super().__init__(daemon=True)
        self.path, self.requests = path, requests
        self.answers: list[object] = []
        self.start()

    def run(self) -> None:
        for request in self.requests:
            try:
                self.answers.append(ask(self.path, request))
            except SpecSyncError as error:
                self.answers.append(f"{type(error).__name__}: {error}")


def drive(sync: SpecTpSync, rank: int, *requests: Request) -> tuple[list[object], dict[int, list[int]]]:
    """Take steps until group rank 0's operator is done; return the answers, and what each step agreed on."""
    operator = Script(sync.control.path, *requests) if rank == 0 else None
    seen = {}
    done = torch.zeros(1)
    while not done.item():
        sync.next_step()
        seen[sync.step] = accept(sync, rank)
        done = torch.tensor([float(operator is not None and not operator.is_alive())])
        dist.broadcast(done, 0)
        time.sleep(0.002)
    return ([] if operator is None else operator.answers), seen


# --- the demo engine: widened it heals, narrowed it shows ----------------------------------------------


def demo_under_control(rank: int, world_size: int, folder: str, folded: bool):
    config = ModelConfig(vocab_size=258, hidden=48, heads=6, layers=1, mlp=48)
    world = World(world_size, "cpu", 0, (b"the sync", b"of all ranks"), (), config=config, new_tokens=(60,), slots=2)
    # The bonus of group rank 1 is wrong in every step: in mode sync that is healed, in mode audit it is committed.
    site = "dspark-accept-graph" if folded else ACCEPT
    job = Job("live", "dspark", "all", 5000, fault=f"{site}:rank=1:from=0:tensor=bonus:add=1", folded=folded)
    member = worker.Rank(world, rank, worker.make_groups(world, rank), Path(folder))
    taps = [FaultInjector(parse_faults(job.fault, member.registry, "test"), rank, allowed=True)]
    plan = worker.plan_of(
        Job("live", "dspark", "all", 5000, control=f"{folder}/ctl.sock"), member.registry, member.manager, "cpu"
    )
    groups = ParallelGroups(tp=TorchGroup(member.groups.tp, member.groups.cpu))
    sync = SpecTpSync(groups, plan, taps=taps)
    requests = [Request("mode", site, "audit"), Request("stats"), Request("sites", "all"), Request("status")]
    operator = Script(f"{folder}/ctl.sock", *requests) if rank == 0 else None
    source = worker.requests_of(world, 0.0)
    worker.requests_of = lambda *_: iter(lambda: next(source) if operator.is_alive() else None, None)
    engine = member._engine(job, sync, None)
    lengths: dict[int, int] = {}
    committed = []

    def on_step(_: int) -> None:
        time.sleep(0.003)
        running = engine._scheduler.running
        committed.append([each.output[lengths.get(each.request.request_id, 1) :] for each in running])
        lengths.update({each.request.request_id: len(each.output) for each in running})

    engine.run(job.steps, on_step)
    sync.control.close()
    return {
        "answers": operator.answers if operator else [],
        "committed": committed,
        "history": list(sync.control.history),
        "digest": sync.plan.digest,
        "generation": sync.plan_generation,
        "mismatches": sync.stats()[site].mismatches,
    }


@pytest.mark.parametrize(("world_size", "folded"), [(3, False), (2, True)])
def test_the_demo_is_narrowed_and_widened_at_the_same_step_on_all_ranks(tmp_path, world_size, folded):
    ranks = run_ranks(demo_under_control, world_size, 60, (str(tmp_path), folded))
    narrowed, stats, widened, status = ranks[0]["answers"]
    assert narrowed["group_ranks"] == widened["group_ranks"] == world_size
    assert narrowed["changes"] == {"dspark-accept-graph" if folded else ACCEPT: ["sync", "audit"]}
    assert widened["digest"] == narrowed["was"] == status["digest"]
    assert len(stats["group_ranks"]) == world_size
    for rank in ranks:
        assert [each["step"] for each in rank["history"]] == [narrowed["applied"], widened["applied"]]
        assert rank["history"] == ranks[0]["history"]
        assert (rank["digest"], rank["generation"]) == (widened["digest"], 2)
    # A step commits before it counts: what was committed after `next_step` said T is in place T of the list.
    pairs = zip(ranks[0]["committed"], ranks[1]["committed"], strict=True)
    differing = [step for step, (on_rank0, on_rank1) in enumerate(pairs) if on_rank0 != on_rank1]
    assert differing, "audit lets the fault through"
    assert narrowed["applied"] <= min(differing)
    assert max(differing) < widened["applied"]
    assert ranks[0]["committed"][narrowed["applied"] : widened["applied"]]
    if world_size == 3:
        assert ranks[2]["committed"] == ranks[0]["committed"]
    assert ranks[1]["mismatches"] > len(differing)


# --- what is refused, and what waits ----------------------------------------------------------------------


class HostGraph:
    """A stand-in for a CUDA graph on a CPU: it keeps the calls of its capture, and makes them again."""

    def __init__(self, sync: SpecTpSync, tensors: list[torch.Tensor]) -> None:
        with sync.capturing() as self.capture:
            self.calls = [(sync.point(ACCEPT).now, tensors)]

    def replay(self) -> None:
        self.capture.check()
        for call, tensors in self.calls:
            call(*tensors)


def caught(act, *args):
    try:
        return act(*args)
    except SpecSyncError as error:
        return f"{type(error).__name__}: {error}"


def many_requests(rank: int, world_size: int, folder: str):
    found: dict[str, object] = {}
    sync = synced(f"{folder}/a.sock")
    tensors = [torch.tensor([1, 2 + rank]), torch.tensor([5, 6]), torch.tensor([0, 0])]
    graph = HostGraph(sync, tensors)
    graph.replay()
    found["replayed"] = tensors[0].tolist()
    sync.control.fix(["dspark-plan"], "this engine decides it by itself")
    found["answers"], found["seen"] = drive(
        sync,
        rank,
        Request("mode", ACCEPT, "audit"),
        Request("sites", "all:audit,-dspark-plam"),
        Request("mode", "dspark-mem", "off"),
        Request("mode", "dspark-plan", "off"),
        Request("mode", "dspark", "off"),
        Request("mode", "dspark", "off"),
        Request("sites", "rng"),
        Request("status"),
    )
    found["stale"] = caught(graph.replay)
    found["plan"] = sync.plan.digest, sync.plan_generation, sync.plan.mode("dspark-mem"), sync.plan.mode("dspark-plan")

    if rank == 1:
        sync.control.forbid("its graphs were captured")
    found["forbidden"] = drive(sync, rank, Request("sites", "off"), Request("status"))[0]
    found["unchanged"] = sync.plan.digest == found["plan"][0]
    sync.control.close()

    sync = synced(f"{folder}/b.sock")  # the second one over the same group hears nothing of the first one's requests
    operator = None
    if rank == 0:  # nobody takes a step meanwhile
        operator = Script(
            sync.control.path, Request("sites", "off", wait_s=0.5), Request("sites", "all"), Request("stats")
        )
        operator.join(20)
    dist.barrier()
    found["idle"] = operator.answers if operator else []
    found["generation while idle"] = sync.plan_generation
    steps = [sync.next_step() or accept(sync, rank) for _ in range(6)]
    found["steps"], found["off at"] = steps, [change["step"] for change in sync.control.history]
    sync.control.close()
    found["left behind"] = [name for name in ("a.sock", "b.sock") if Path(folder, name).exists()]
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("control")
    return run_ranks(many_requests, 2, 60, (str(folder),))


def test_sites_change_in_the_middle_of_a_run(found):
    first, *_ = found[0]["answers"]
    step = first["applied"]
    for rank, result in enumerate(found):
        seen = result["seen"]
        assert seen[step - 1] == [1, 2]
        assert seen[step] == [1, 2 + rank]
    off = found[0]["answers"][4]
    assert off["applied"] > step
    assert off["changes"][ACCEPT] == ["audit", "off"]


def test_what_cannot_be_done_is_refused_with_a_reason(found):
    _, typo, gate, fixed, *_ = found[0]["answers"]
    assert typo.startswith("ControlError: specsync ctl: unknown token 'dspark-plam' (did you mean 'dspark-plan'?).")
    assert "Sites: dspark-mem, dspark-draft-greedy, " in typo
    assert "dspark-mem stays sync: a host agreement stays as it was at the start" in gate
    assert "Leave it out, and it stays as it is." in gate
    assert "dspark-plan stays sync: this engine decides it by itself." in fixed


def test_sites_that_must_stay_do_so_when_a_preset_names_them(found):
    off, again, rng, status = found[0]["answers"][4:]
    assert set(off["kept"]) == {"dspark-mem", "dspark-plan"}
    assert again["applied"] is None
    assert again["changes"] == {}
    assert rng["applied"] is not None
    assert status["sites"]["dspark-mem"] == status["sites"]["dspark-plan"] == "sync"
    assert {"dspark-mem", "dspark-plan"} < set(status["fixed"])
    assert [change["request"] for change in status["history"]] == [
        f"mode {ACCEPT} audit",
        "mode dspark off",
        "sites rng",
    ]


def test_plans_are_equal_afterwards(found):
    assert found[0]["plan"] == found[1]["plan"]
    assert found[0]["plan"][1:] == (3, "sync", "sync")
    assert found[0]["plan"][0] == found[0]["answers"][-1]["digest"]


def test_a_graph_captured_under_another_plan_is_refused_on_every_rank(found):
    for result in found:
        assert result["replayed"] == [1, 2]
        assert result["stale"].startswith("PlanMismatchError: a graph that was captured under plan ")
        assert "(generation 0) must not be replayed under plan" in result["stale"]
        assert result["stale"].endswith("Capture it again, on every rank at the same step.")


def test_one_rank_that_refuses_keeps_all_ranks_as_they_are(found):
    refused, status = found[0]["forbidden"]
    assert refused == ("ControlError: group rank 1 refuses: its graphs were captured\n  Nothing was changed.")
    assert status["pending_step"] is None
    assert all(result["unchanged"] for result in found)


def test_an_engine_that_takes_no_step_changes_at_the_next_one(found):
    pending, second, stats = found[0]["idle"]
    assert pending["applied"] is None
    assert pending["pending_step"] == 2
    assert "another change is under way, or waits for the engine's next step" in second
    assert stats["group_ranks"] == {"0": {}, "1": {}}
    for rank, result in enumerate(found):
        assert result["generation while idle"] == 0
        assert result["off at"] == [2]
        assert result["steps"] == [[1, 2]] + [[1, 2 + rank]] * 5


def test_a_closed_control_leaves_no_socket(found):
    assert found[0]["left behind"] == []


# --- hooks of an engine -------------------------------------------------------------------------------------


def hooked_engine(rank: int, world_size: int, folder: str):
    runner, _ = make_engine(rank, fails=False)
    os.environ["SPECSYNC_CONTROL"] = f"{folder}/e.sock"
    sync = hook("off")  # nothing is on when the engine starts
    operator = Script(sync.control.path, Request("sites", "vllm-tokens")) if rank == 0 else None
    before = runner._sample(None, None).sampled_token_ids.tolist()
    done = torch.zeros(1)
    while not done.item():
        sync.next_step()
        after = runner._sample(None, None).sampled_token_ids.tolist()
        done = torch.tensor([float(operator is not None and not operator.is_alive())])
        dist.broadcast(done, 0)
        time.sleep(0.002)
    return before, after, runner._input_fits_in_drafter(None)


def test_an_engines_hooks_are_there_for_sites_that_are_turned_on_later(tmp_path):
    ranks = run_ranks(hooked_engine, 2, 40, (str(tmp_path),))
    for rank, (before, after, fits) in enumerate(ranks):
        assert before == [[rank, -1]]
        assert after == [[0, -1]]
        assert fits is (rank == 0)  # a host agreement stays off


# --- ranks that fail ----------------------------------------------------------------------------------------


def a_rank_that_never_pledges(rank: int, world_size: int, folder: str):
    sync = synced(f"{folder}/c.sock")
    if rank == 1:
        pledges.Pledges._hear_verdict = lambda self, proposal: None
    operator = Script(sync.control.path, Request("sites", "off", wait_s=1)) if rank == 0 else None
    try:
        while True:
            sync.next_step()
            accept(sync, rank)
            time.sleep(0.002)
    except SpecSyncError as error:
        if operator:
            operator.join()
        return f"{type(error).__name__}: {error}", sync.plan_generation, operator.answers if operator else None


def test_ranks_that_wait_for_a_pledge_end_together(tmp_path):
    (text, generation, answers), (their_text, their_generation, _) = run_ranks(
        a_rank_that_never_pledges, 2, 40, (str(tmp_path),)
    )
    assert text.startswith(
        "TransportError: the ranks could not settle on a step for a change of sites: group rank 0 heard nothing from"
        " group rank 1 for 4 s. Group rank 1 waits in broadcast"
    )
    assert "the ranks could not settle on a step" in their_text
    assert generation == their_generation == 0
    assert "did not report within" in answers[0]


def a_rank_that_is_stopped(rank: int, world_size: int, folder: str):
    sync = synced(f"{folder}/d.sock")
    pledges.ARM_S = 1.0
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.2)
    refused = caught(ask, sync.control.path, Request("sites", "off"))
    return refused, sync.plan_generation, sync.control._pledges.target


def test_a_stopped_rank_is_named_and_nothing_changes(tmp_path):
    (refused, generation, target), _ = run_ranks(a_rank_that_is_stopped, 2, 40, (str(tmp_path),), lost={1})
    assert refused.startswith("ControlError: group rank 1 did not answer within 1 s. Group rank 1")
    assert "is stopped (SIGSTOP)" in refused
    assert refused.endswith("Nothing was changed.")
    assert (generation, target) == (0, None)


def start_ups(rank: int, world_size: int, folder: str):
    here = Path(folder, "here")
    if rank == 0:
        here.write_text("mine")
    dist.barrier()
    return [
        caught(synced, str(here)),
        caught(synced, f"{folder}/{'x' * 100}"),
        caught(synced, f"{folder}/one.sock", 0),
    ]


def test_a_start_that_cannot_be_controlled_fails_on_every_rank(tmp_path):
    ranks = run_ranks(start_ups, 2, 40, (str(tmp_path),))
    assert ranks[0][:2] == ranks[1][:2]
    taken, long, alone = ranks[0]
    assert "there is a file that is no socket. It is left alone: give another path." in taken
    assert (tmp_path / "here").read_text() == "mine"
    assert "a socket's has at most 107. Give a shorter one." in long
    assert "control: on on group rank 0, off on group rank 1" in alone
    assert all(error.startswith("ControlError: SPECSYNC_CONTROL: ") for error in (taken, long))
    assert all(result[2].startswith("PlanMismatchError") for result in ranks)


def test_without_live_control_nothing_can_change():
    class LoneGroup:
        world_size, rank_in_group, cpu_group = 1, 0, None

        def broadcast(self, tensor, src=0):
            raise AssertionError

    plan = resolve_plan(load_registry(), {"SPECSYNC_CONTROL": "/nowhere/x.sock"}, facts=Facts(platform="cpu"))
    sync = SpecTpSync(ParallelGroups(tp=LoneGroup()), plan)
    assert sync.control is None
    assert not sync.reachable(ACCEPT)
    with pytest.raises(ControlError, match=r"only where live control is on\. Start with SPECSYNC_CONTROL=PATH\."):
        sync.change_modes({ACCEPT: "off"}, "test")
