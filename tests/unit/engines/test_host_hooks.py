"""Hooks of host decisions, over a sync that notes its calls."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from specsync_core import BroadcastPoint, no_tensors
from specsync_core.engines.hooks import active_points, build_hooks
from specsync_core.engines.host_hooks import pack, unpack
from specsync_core.engines.proof import Firings

POINT = BroadcastPoint(
    target="toy.draft",
    when="after",
    sites=("vllm-draft-rows",),
    site_of=lambda _: "vllm-draft-rows",
    tensors_of=no_tensors,
    versions="==1",
    signature=("history",),
    rows=True,
    unless="vllm-draft-lead",
)
LEAD = replace(POINT, unless=None, sites=("vllm-draft-lead",), site_of=lambda _: "vllm-draft-lead", leads=True)
COUNT = replace(
    POINT, sites=("vllm-token-count",), site_of=lambda _: "vllm-token-count", rows=False, op="root", value_of=None
)


class Sync:
    def __init__(self, modes, rank=0):
        self.modes, self.rank = modes, rank
        self.plan = SimpleNamespace(mode=lambda slug: self.modes.get(slug, "off"))
        self.agreed = []

    def enabled(self, slug):
        return self.modes.get(slug, "off") != "off"

    reachable = enabled

    def lead(self, site, compute):
        return compute() if self.rank == 0 else pack([[7]])

    def sync_lists(self, site, rows):
        return [[9], []]

    def agree(self, site, value, op):
        self.agreed.append((site, value, op))
        return [4]


def build(sync, *points):
    firings = Firings()
    return list(build_hooks(active_points(points, sync), sync, firings)), firings


@pytest.mark.parametrize("rows", [[], [[]], [[1, 2], [], [3]]])
def test_rows_survive_packing(rows):
    assert unpack(pack(rows)) == rows


def test_rows_are_replaced_by_group_rank_0s():
    (hook,), firings = build(Sync({"vllm-draft-rows": "sync"}), POINT)
    assert hook.function([[1, 2]], "history") == [[9], []]
    assert firings.counts == {"toy.draft": 1}


@pytest.mark.parametrize(("rank", "drafts", "ran"), [(0, [[1, 2], []], True), (1, [[7]], False)])
def test_only_group_rank_0_runs_a_led_function(rank, drafts, ran):
    (hook,), _ = build(Sync({"vllm-draft-lead": "sync"}, rank), LEAD)
    runs = []
    assert hook.function(lambda history: runs.append(history) or [[1, 2], []], "history") == drafts
    assert runs == (["history"] if ran else [])


@pytest.mark.parametrize(("mode", "hooked"), [("sync", ["around"]), ("audit", ["around", "after"]), ("off", ["after"])])
def test_rows_are_left_alone_where_one_rank_drafts(mode, hooked):
    hooks, _ = build(Sync({"vllm-draft-lead": mode, "vllm-draft-rows": "sync"}), LEAD, POINT)
    assert [hook.kind for hook in hooks] == hooked


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_given_value_is_agreed_on_and_put_back(when):
    put = []
    point = replace(COUNT, when=when, value_of=lambda call: call.args, put=lambda call, value: put.append(value))
    sync = Sync({"vllm-token-count": "sync"})
    (hook,), _ = build(sync, point)
    assert hook.kind == when
    hook.function(*((3,) if when == "before" else ("result", 3)))
    assert sync.agreed == [("vllm-token-count", (3,), "root")]
    assert put == [[4]]
