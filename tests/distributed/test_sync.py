"""SpecTpSync over real gloo ranks that start from different values."""

import logging
import os
import time

import pytest
import torch
import torch.distributed as dist

from specsync_core import Facts, ParallelGroups, SpecTpSync, TorchGroup, load_registry, resolve_plan
from specsync_core.errors import (
    GroupError,
    PayloadError,
    PlanMismatchError,
    PolicyError,
    RegistryError,
    SpecSyncError,
    TransportError,
)
from specsync_core.groups import select_group
from specsync_core.testing import run_ranks


def planned(policy: str = "all", **environ: str):
    environ = {"SPECSYNC_SITES": policy, "SPECSYNC_TIMEOUT_S": "5", **environ}
    return resolve_plan(load_registry(), environ=environ, facts=Facts(platform="cpu"))


def synced(policy: str = "all", groups: ParallelGroups | None = None, **environ: str) -> SpecTpSync:
    return SpecTpSync(groups or ParallelGroups(tp=TorchGroup()), plan=planned(policy, **environ))


def triple(rank: int) -> tuple[torch.Tensor, ...]:
    return torch.arange(6) + rank, torch.arange(6) * (rank + 1), torch.full((6,), rank)


def caught(fn, *args, **kwargs):
    started = time.monotonic()
    try:
        return "value", fn(*args, **kwargs), time.monotonic() - started
    except SpecSyncError as error:
        return type(error).__name__, str(error), time.monotonic() - started


def modes_and_transports(rank: int, world_size: int) -> dict[str, object]:
    found: dict[str, object] = {}
    for transport in ("auto", "grouped", "group"):
        for counters in ("on", "off"):
            sync = synced(
                "all,dspark-accept-sample:audit,-dspark-plan", SPECSYNC_TRANSPORT=transport, SPECSYNC_COUNTERS=counters
            )
            sync.next_step()
            name = f"{transport} {counters}"
            own = triple(rank)
            result = sync.sync("dspark-accept-greedy", *own)
            point = sync.point(8)
            again = point(*triple(rank))
            found[name] = [tensor.tolist() for tensor in own]
            found[f"{name} in place"] = all(mine is back for mine, back in zip(own, result, strict=True))
            found[f"{name} bound"] = [tensor.tolist() for tensor in again] == found[name]
            audited = sync.sync("dspark-accept-sample", *triple(rank))
            found[f"{name} audit kept"] = all(map(torch.equal, audited, triple(rank)))
            plan = torch.full((3,), rank, dtype=torch.int32)
            found[f"{name} off"] = sync.sync("dspark_plan", plan) is plan and plan.tolist() == [rank] * 3
            found[f"{name} stats"] = {
                slug: (stats.calls, stats.compared, stats.mismatches, stats.mismatched_calls)
                for slug, stats in sync.stats().items()
                if stats.calls
            }
            first = sync.stats()["dspark-accept-sample"].first_divergence
            found[f"{name} first"] = first and (
                first.step,
                first.call,
                first.group_rank,
                first.tensor,
                first.index,
                first.own,
                first.rank0,
            )
            empty = sync.sync("dspark-target", torch.zeros(0, dtype=torch.int64))
            found[f"{name} empty"] = tuple(empty.shape)
    return found


def test_modes_over_every_transport():
    for rank, found in enumerate(run_ranks(modes_and_transports, 2, timeout_s=60)):
        for transport in ("auto", "grouped", "group"):
            for counters in ("on", "off"):
                name = f"{transport} {counters}"
                assert found[name] == [tensor.tolist() for tensor in triple(0)]
                assert found[f"{name} in place"]
                assert found[f"{name} bound"]
                assert found[f"{name} audit kept"]
                assert found[f"{name} off"]
                assert found[f"{name} empty"] == (0,)
                # arange + 1 differs in 6, arange * 2 in 5 (0 is 0), full in 6: 17 of 18, twice where both calls count
                compared = rank == 1
                healed = (2, 36, 34, 2) if compared and counters == "on" else (2, 0, 0, 0)
                audited = (1, 18, 17, 1) if compared else (1, 0, 0, 0)
                assert found[f"{name} stats"] == {"dspark-accept-greedy": healed, "dspark-accept-sample": audited}
                assert found[f"{name} first"] == ((1, 1, 1, "correct_len", (0,), 1, 0) if compared else None)


def subgroups(rank: int, world_size: int) -> dict[str, object]:
    attention = [dist.new_group([1, 0], sort_ranks=False), dist.new_group([3, 2], sort_ranks=False)]
    mine = TorchGroup(attention[rank // 2])
    groups = ParallelGroups(tp=TorchGroup(), attn_tp=mine, dp_attention=True)
    sync = synced(groups=groups)
    found: dict[str, object] = {
        "group": sync.plan["dspark-target"].group.value,
        "selected": select_group(groups) is mine,
    }
    found["tokens"] = sync.sync("dspark-target", torch.full((rank // 2 + 1,), rank)).tolist()
    found["memory"] = sync._agree("dspark-mem", "min", None, lambda: 4.0 - rank)
    found["inert"] = caught(sync.available_memory_gb, "dspark-mem", "cpu", 0, group=FakeGroupOfOne())
    return found


class FakeGroupOfOne:
    world_size, rank_in_group, cpu_group = 1, 0, None

    def broadcast(self, tensor, src=0):
        raise AssertionError("a group of one broadcasts nothing")


def test_attention_groups_broadcast_on_their_own_and_agree_on_memory_together():
    for rank, found in enumerate(run_ranks(subgroups, 4, timeout_s=60)):
        assert found["group"] == "attn_tp"
        assert found["selected"]
        assert found["tokens"] == ([1] if rank < 2 else [3, 3]), "group rank 0 of each pair is its second global rank"
        assert found["memory"] == 1.0
        assert found["inert"][0] == GroupError.__name__


def attention_groups_of_one(rank: int, world_size: int) -> dict[str, object]:
    """SG #39886: the broadcast group has one rank, the capture group has more."""
    own = [
        TorchGroup(dist.new_group([member])) if member == rank else dist.new_group([member])
        for member in range(world_size)
    ][rank]
    sync = synced(groups=ParallelGroups(tp=TorchGroup(), attn_tp=own, dp_attention=True))
    measured = [3.0, 0.75][rank]
    import specsync_core.sync as module

    module.free_memory_gib = lambda device, gpu_id: measured
    tokens = torch.full((3,), rank)
    off = synced("off", groups=ParallelGroups(tp=TorchGroup(), attn_tp=own, dp_attention=True))
    return {
        "minimum": sync.available_memory_gb("dspark-mem", "cpu", 0, group=TorchGroup()),
        "tp by default": sync.available_memory_gb("dflash-mem", "cpu", 0),
        "off": off.available_memory_gb("dspark-mem", "cpu", 0),
        "no copy": sync.sync("dspark-target", tokens) is tokens and tokens.tolist() == [rank] * 3,
        "enabled": (sync.enabled("dspark-mem"), sync.enabled("dspark-target"), off.enabled(1)),
    }


def test_memory_gates_agree_also_when_the_broadcast_group_has_one_rank():
    for rank, found in enumerate(run_ranks(attention_groups_of_one, 2)):
        assert found["minimum"] == found["tp by default"] == 0.75
        assert found["off"] == [3.0, 0.75][rank]
        assert found["no copy"]
        assert found["enabled"] == (True, False, False)


def bad_payloads(rank: int, world_size: int, case: str) -> object:
    sync = synced()
    good = triple(rank)
    sync.sync("dspark-accept-greedy", *good)  # the shapes of the good call are known to both
    bad = {
        "count": good[:2],
        "dtype": (good[0].float(), *good[1:]),
        "declared shape": (good[0].reshape(2, 3), *good[1:]),
        "other batch": tuple(tensor[:5].clone() for tensor in good),
        "not a tensor": (good[0].tolist(), *good[1:]),
        "expanded": (torch.full((1,), rank).expand(6), *good[1:]),
    }[case]
    calls = [caught(sync.sync, "dspark-accept-greedy", *(bad if rank == 1 else triple(rank)))]
    deadline = time.monotonic() + 15
    while rank == 0 and calls[-1][0] == "value" and time.monotonic() < deadline:
        calls.append(caught(sync.sync, "dspark-accept-greedy", *triple(rank)))
        time.sleep(0.05)
    return calls[-1], caught(sync.sync, "dspark-accept-greedy", *triple(rank))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "count",
            "dspark-accept-greedy: it takes 3 tensors, not 2. It is called with int64[6], int64[6];"
            " the site takes correct_len int32|int64[B]",
        ),
        ("dtype", "correct_len is float32, not int32 or int64"),
        ("declared shape", "correct_len has shape [2, 3], not [B]"),
        ("not a tensor", "correct_len is a list, not a tensor"),
        ("expanded", "correct_len is an expanded view"),
    ],
)
def test_one_ranks_bad_payload_raises_on_every_rank_and_stays_raised(case, message):
    root, peer = run_ranks(bad_payloads, 2, args=(case,), group_timeout_s=60)
    for rank, (call, after) in enumerate((root, peer)):
        assert call[0] == after[0] == PayloadError.__name__, f"rank {rank}: {call}"
        assert message in call[1]
        assert message in after[1]
        assert call[2] < 10
    assert root[0][1].startswith("group rank 1 gave up: ")


def test_a_batch_of_another_size_on_one_rank_ends_both_within_the_time_out():
    root, peer = run_ranks(bad_payloads, 2, args=("other batch",), group_timeout_s=60)
    assert peer[0][0] == TransportError.__name__ or peer[0][0] == "AbsentRankError"
    assert "payload of dspark-accept-greedy: group rank 0 of 2 did not arrive within 5 s" in peer[0][1]
    for (_, message, _), _ in (root, peer):
        assert "group rank 1 brings int64[5], int64[5], int64[5] for the first time" in message
        assert "Group rank 0 waits in broadcast of dspark-accept-greedy with int64[6], int64[6], int64[6]" in message
    assert root[0][1].startswith("group rank 1 gave up: dspark-accept-greedy: ")


def new_batches(rank: int, world_size: int) -> object:
    sync = synced()
    return caught(sync.sync, "dspark-target", torch.full((8 - rank,), rank))


def test_batches_that_differ_when_first_seen_are_named_on_every_rank():
    for kind, message, _ in run_ranks(new_batches, 2):
        assert kind == PayloadError.__name__
        assert (
            "dspark-target: the ranks bring different payloads: group rank 0 int64[8]; group rank 1 int64[7]."
            in message
        )


def plans(rank: int, world_size: int) -> object:
    return caught(synced, "all" if rank == 0 else "all,-dspark-plan")


def test_different_plans_raise_on_every_rank_and_name_the_site():
    for kind, message, _ in run_ranks(plans, 2):
        assert kind == PlanMismatchError.__name__
        assert "dspark-plan mode: sync on group rank 0, off on group rank 1\n" in message
        assert "Their policies come from: group rank 0: SPECSYNC_SITES" in message


def typo_on_one_rank(rank: int, world_size: int) -> object:
    os.environ["SPECSYNC_SITES"] = "all,-dspark-plam" if rank == 1 else "all"
    return caught(SpecTpSync, ParallelGroups(tp=TorchGroup()))


def test_a_typo_on_one_rank_reaches_the_others_at_once():
    zero, one = run_ranks(typo_on_one_rank, 2)
    assert zero[0] == one[0] == PolicyError.__name__
    assert one[1].startswith("SPECSYNC_SITES: unknown token 'dspark-plam' (did you mean 'dspark-plan'?)")
    assert zero[1].startswith(f"group rank 1 gave up: {one[1]}")
    assert zero[2] < 20, "it waited for the handshake's time-out instead"


def absent(rank: int, world_size: int) -> object:
    if rank == 1:
        time.sleep(4)
        return None
    return caught(synced, SPECSYNC_TIMEOUT_S="1")


def test_a_rank_that_never_arrives_is_named():
    kind, message, waited_s = run_ranks(absent, 2)[0]
    assert kind == PlanMismatchError.__name__
    assert "group rank 1 of 2 did not arrive within 1 s" in message
    assert waited_s < 4


def wrong_sites(rank: int, world_size: int) -> dict[str, object]:
    sync = synced()
    tokens = torch.zeros(2, dtype=torch.int64)
    return {
        "unknown": caught(sync.sync, "dspark-plam", tokens),
        "unknown number": caught(sync.point, 999),
        "kind": caught(sync.sync, "dspark-mem", tokens),
        "agree": caught(sync.agree, "dspark-plan", 1, "min"),
        "still usable": caught(sync.sync, "dspark-target", tokens + rank)[1].tolist(),
    }


def test_sites_that_do_not_exist_or_are_of_another_kind_are_refused_before_any_collective():
    for found in run_ranks(wrong_sites, 2):
        assert found["unknown"][:1] == (RegistryError.__name__,)
        assert "unknown site 'dspark-plam' (did you mean 'dspark-plan'?)" in found["unknown"][1]
        assert "unknown site 999" in found["unknown number"][1]
        assert (
            "dspark-mem is of kind consensus; sync takes broadcast sites. Use available_memory_gb or agree."
            in found["kind"][1]
        )
        assert "dspark-plan is of kind broadcast; agree takes consensus sites. Use sync." in found["agree"][1]
        assert found["still usable"] == [0, 0]


def agreements(rank: int, world_size: int) -> dict[str, object]:
    sync, audit, off = synced(), synced("all:audit"), synced("off")
    found = {
        name: each.agree("dspark-mem", 10 + rank, op="max")
        for name, each in (("sync", sync), ("audit", audit), ("off", off))
    }
    first = audit.stats()["dspark-mem"].first_divergence
    return {
        **found,
        "first": first and (first.own, first.rank0),
        "free": sync.available_memory_gb("dspark-mem", "cpu", 0),
    }


def test_agreements_follow_the_mode_and_are_counted():
    zero, one = run_ranks(agreements, 2)
    assert zero["free"] == one["free"] > 0
    assert (zero["sync"], zero["audit"], zero["off"], zero["first"]) == (11, 10, 10, (10, 11))
    assert (one["sync"], one["audit"], one["off"], one["first"]) == (11, 11, 11, None)


class Scribe:
    """A tap that changes rank 1's value before, and remembers what it saw."""

    def __init__(self, rank: int) -> None:
        self.rank, self.seen = rank, []

    def before(self, site, tensors, step):
        self.seen.append((site.slug, step, tensors[0].tolist()))
        if self.rank == 1:
            tensors[0].add_(100)
        return False if site.slug == "dflash-target" else None

    def after(self, site, tensors, step):
        self.seen.append((site.slug, step, tensors[0].tolist()))


def tapped(rank: int, world_size: int) -> list[object]:
    tap = Scribe(rank)
    sync = SpecTpSync(ParallelGroups(tp=TorchGroup()), plan=planned("all,-dspark-plan"), taps=(tap,))
    sync.next_step()
    sync.sync("dspark-target", torch.full((2,), rank))
    sync.sync("dspark-plan", torch.full((2,), rank, dtype=torch.int32))
    sync.sync("dflash-target", torch.full((2,), rank))
    tap.seen.append(sync.agree("dspark-mem", float(rank), "max"))
    return tap.seen


def test_taps_see_own_values_before_and_agreed_ones_after_also_where_a_site_is_off():
    zero, one = run_ranks(tapped, 2)
    assert zero[:6] == [
        ("dspark-target", 1, [0, 0]),
        ("dspark-target", 1, [0, 0]),
        ("dspark-plan", 1, [0, 0]),
        ("dspark-plan", 1, [0, 0]),
        ("dflash-target", 1, [0, 0]),
        ("dflash-target", 1, [0, 0]),
    ]
    assert one[:6] == [
        ("dspark-target", 1, [1, 1]),
        ("dspark-target", 1, [0, 0]),
        ("dspark-plan", 1, [1, 1]),
        ("dspark-plan", 1, [101, 101]),
        ("dflash-target", 1, [1, 1]),
        ("dflash-target", 1, [101, 101]),
    ]
    assert zero[6:] == [("dspark-mem", 1, 0.0), ("dspark-mem", 1, 101.0), 101.0]
    assert one[6:] == [("dspark-mem", 1, 1.0), ("dspark-mem", 1, 101.0), 101.0]


def warnings_of(rank: int, world_size: int) -> list[str]:
    messages: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record):
            messages.append(record.getMessage())

    logging.getLogger("specsync").addHandler(Handler())
    synced("all")
    assert not messages
    synced("all,-dspark-plan")
    return messages


def test_only_rank_0_warns_of_a_plan_narrower_than_all():
    zero, one = run_ranks(warnings_of, 2)
    assert one == []
    assert len(zero) == 1
    assert "dspark-plan" in zero[0]
    assert "SPECSYNC_SITES" in zero[0]
