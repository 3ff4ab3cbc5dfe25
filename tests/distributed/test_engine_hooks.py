"""Replaced functions on real ranks: group rank 0's decision everywhere, and what is raised on one rank on all."""

import os
import sys
from types import ModuleType, SimpleNamespace

import torch

from specsync_core import (
    ParallelGroups,
    SpecSyncError,
    SpecTpSync,
    TorchGroup,
    load_registry,
    plugin_manager,
    resolve_plan,
)
from specsync_core.collectives import store_of
from specsync_core.engines.hooks import active_points, build_hooks
from specsync_core.engines.patch import apply_hooks
from specsync_core.engines.proof import Firings
from specsync_core.errors import EngineError
from specsync_core.facts import EngineFacts
from specsync_core.testing import run_ranks

RUNNER = "vllm.v1.worker.gpu_model_runner"
NGRAM = "vllm.v1.spec_decode.ngram_proposer"


def make_engine(rank, fails):
    """The two functions of vLLM that decide for ngram, by name only."""

    class GPUModelRunner:
        def _sample(self, logits, spec_decode_metadata):
            if fails and rank == 1:
                raise RuntimeError("no memory")
            return SimpleNamespace(sampled_token_ids=torch.tensor([[rank, -1]], dtype=torch.int32))

        def _input_fits_in_drafter(self, common_attn_metadata):
            return rank == 0

    class NgramProposer:
        calls = 0

        def propose(self, *args):
            self.calls += 1
            return [[rank] * (3 - rank), []]

    for name in ("vllm", "vllm.v1", "vllm.v1.worker", "vllm.v1.spec_decode"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = []
    for name, owner in ((RUNNER, GPUModelRunner), (NGRAM, NgramProposer)):
        sys.modules[name] = ModuleType(name)
        setattr(sys.modules[name], owner.__name__, owner)
    return GPUModelRunner(), NgramProposer()


def hook(policy):
    group = TorchGroup()
    manager = plugin_manager()
    facts = EngineFacts(engine="vllm", version="0.32.0", algorithm="ngram", platform="cpu")
    control = {name: value for name, value in os.environ.items() if name == "SPECSYNC_CONTROL"}
    plan = resolve_plan(load_registry(manager), {"SPECSYNC_SITES": policy, **control}, facts=facts, manager=manager)
    sync = SpecTpSync(ParallelGroups(tp=group), plan)
    points = [point for _, found in manager.ask("specsync_broadcast_points", engine=facts) for point in found]
    ours = [point for point in points if not point.target.startswith("vllm.v1.worker.gpu.")]
    store = store_of(group.cpu_group)

    def fail(target, error):
        is_ours = isinstance(error, SpecSyncError)
        store.fail(error if is_ours else EngineError(f"{target} raised {type(error).__name__}: {error}"))

    assert apply_hooks(list(build_hooks(active_points(ours, sync), sync, Firings())), fail) == []
    return sync


def decide(rank, world_size, policy):
    runner, proposer = make_engine(rank, fails=False)
    sync = hook(policy)
    tokens = runner._sample(None, None).sampled_token_ids.tolist()
    fits = runner._input_fits_in_drafter(None)
    drafts = proposer.propose(3, [], None, None)
    differing = {slug: stats.mismatched_calls for slug, stats in sync.stats().items() if stats.calls}
    return tokens, fits, drafts, proposer.calls, differing


def test_group_rank_0_decides_and_alone_looks_drafts_up():
    first, second = run_ranks(decide, 2, args=("all",))
    assert first[:3] == second[:3] == ([[0, -1]], False, [[0, 0, 0], []])
    assert (first[3], second[3]) == (1, 0)


def test_every_rank_drafts_where_leading_is_off_and_gets_group_rank_0s_rows():
    first, second = run_ranks(decide, 2, args=("all,-vllm-draft-lead",))
    assert first[2] == second[2] == [[0, 0, 0], []]
    assert (first[3], second[3]) == (1, 1)


def test_audit_counts_and_changes_nothing():
    first, second = run_ranks(decide, 2, args=("all:audit",))
    assert (first[:3], second[:3]) == (([[0, -1]], True, [[0, 0, 0], []]), ([[1, -1]], False, [[1, 1], []]))
    assert second[4] == {"vllm-tokens": 1, "vllm-drafter-gate": 0, "vllm-draft-rows": 1, "vllm-draft-lead": 1}
    assert first[4]["vllm-drafter-gate"] == 1  # it would, the other would not, so the group does not


def fail_on_one(rank, world_size):
    runner, _ = make_engine(rank, fails=True)
    hook("all")
    try:
        runner._sample(None, None)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "returned"


def test_an_error_inside_a_hooked_function_reaches_the_rank_that_waits():
    waiting, failing = run_ranks(fail_on_one, 2)
    assert failing == "RuntimeError: no memory"
    assert waiting.startswith("EngineError: group rank 1 gave up")
    assert "GPUModelRunner._sample raised RuntimeError: no memory" in waiting
