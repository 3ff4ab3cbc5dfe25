"""The broadcast point in vLLM, over a stand-in of its function, and against an installed engine."""

import ast
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import specsync_medusa
import torch
from specsync_medusa import vllm

from specsync_core import EngineFacts, Facts, ParallelGroups, SpecTpSync, load_registry, plugin_manager, resolve_plan
from specsync_core.testing import hooked

FACTS = EngineFacts(platform="cuda", engine="vllm", version="0.32.0", algorithm="medusa", dp_attention=False)


def propose(self, num_speculative_tokens, target_hidden_states, sampling_metadata, slot_mappings=None):
    """What vLLM's does: the likeliest token of every head."""
    return torch.stack([(target_hidden_states @ head).argmax(-1) for head in self.heads], dim=1)


def draft(group, sites):
    manager = plugin_manager({})
    if "medusa" not in [info.name for info in manager.plugins()]:
        manager.register(specsync_medusa, "medusa", "specsync-medusa")
    environ = {} if sites is None else {"SPECSYNC_SITES": sites}
    sync = SpecTpSync(
        ParallelGroups(tp=group), resolve_plan(load_registry(manager), environ, facts=FACTS, manager=manager)
    )
    (point,) = vllm.points(FACTS)
    own = torch.Generator().manual_seed(group.rank_in_group)
    proposer = SimpleNamespace(heads=[torch.randn(8, 32, generator=own) for _ in range(3)])
    hidden_BD = torch.randn(5, 8, generator=own)
    drafted = hooked(point, propose, sync)(proposer, 3, hidden_BD, None)
    return propose(proposer, 3, hidden_BD, None), drafted, sync.stats()["medusa-block"].calls


def test_the_block_is_group_rank_0s(specsync_fake_ranks, specsync_no_settings):
    (own, first, calls), (_, second, _) = specsync_fake_ranks(draft, 2, args=("medusa",))
    assert torch.equal(first, second)
    assert torch.equal(first, own)
    assert calls == 1


def test_without_its_site_the_ranks_keep_their_own(specsync_fake_ranks, specsync_no_settings):
    (_, first, calls), (own, second, _) = specsync_fake_ranks(draft, 2, args=("none",))
    assert not torch.equal(first, second)
    assert torch.equal(second, own)
    assert calls == 0


def test_no_rows_are_left_alone():
    (point,) = vllm.points(FACTS)
    assert point.site_of(SimpleNamespace(result=torch.zeros(0, 3))) is None


def test_its_policy_leaves_one_site_for_the_block():
    manager = plugin_manager({})
    if "medusa" not in [info.name for info in manager.plugins()]:
        manager.register(specsync_medusa, "medusa", "specsync-medusa")
    plan = resolve_plan(load_registry(manager), {}, facts=FACTS, manager=manager)
    assert (plan.mode("medusa-block"), plan.mode("vllm-draft-block")) == ("sync", "off")
    assert "plugin medusa" in plan["vllm-draft-block"].mode.origin
    assert vllm.policy(Facts(platform="cuda")) is None


def test_it_has_no_points_elsewhere():
    assert vllm.points(EngineFacts(engine="sglang", version="0.5.17")) == ()
    assert vllm.points(EngineFacts(engine="vllm", version="0.32.0", algorithm="eagle")) == ()


def test_vllm_still_has_the_function_that_was_read():
    found = find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("no vLLM is installed here")
    (point,) = vllm.points(FACTS)
    tree = ast.parse((Path(found.origin).parent / "v1/spec_decode/medusa.py").read_text())
    methods = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "propose"]
    assert [tuple(argument.arg for argument in method.args.args) for method in methods] == [point.signature]
