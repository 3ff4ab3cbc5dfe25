"""What specsync asks of every plugin, and what Medusa owes beyond it: at temperature 0 the target's own text."""

import specsync_medusa
import torch

from specsync_core import Facts, ParallelGroups, SpecTpSync, load_registry, plugin_manager, resolve_plan
from specsync_core.testing import Scenario, Skew


def registry():
    manager = plugin_manager({})
    if "medusa" not in [info.name for info in manager.plugins()]:  # it is tested without being installed
        manager.register(specsync_medusa, "medusa", "specsync-medusa")
    return manager, load_registry(manager)


def test_it_keeps_every_rule(specsync_conformance):
    report = specsync_conformance(specsync_medusa)
    assert len(report.declared) == 7
    assert report.captured == {"medusa-heads"}
    assert "vllm.v1.spec_decode.medusa.MedusaProposer.propose" in report.points["medusa-block"]


def test_its_sites_join_the_presets_by_what_they_are():
    _, merged = registry()
    rng = {site.slug for site in merged.preset_sites("rng")}
    assert {slug for slug in rng if slug.startswith("medusa")} == {
        *("medusa-mem", "medusa-accept-typical", "medusa-accept-simulated", "medusa-target"),
    }
    assert "medusa-mem" in {site.slug for site in merged.preset_sites("init")}


def decode(group, engine, skew):
    manager, merged = registry()
    plan = resolve_plan(merged, {}, facts=Facts(platform="cpu"), manager=manager)
    sync = SpecTpSync(ParallelGroups(tp=group), plan)
    rank = group.rank_in_group
    member = engine(
        specsync_medusa.specsync_algorithm(), sync, Scenario(steps=8), rank=rank, skew=skew if rank else None
    )
    return member, member.run()


def test_greedy_output_is_the_targets_own(specsync_fake_ranks, specsync_fake_engine, specsync_no_settings):
    (engine, results), _ = specsync_fake_ranks(decode, 2, args=(specsync_fake_engine, Skew(draft=3.0, target=3.0)))
    anchor_B = results[0].tensors["first_token"]
    accepted = 0
    for verdict in [result.tensors for result in results if "commit_lens_B" in result.tensors]:
        for row, length in enumerate(verdict["commit_lens_B"].tolist()):
            for token in verdict["tokens_BC"][row, :length]:
                assert int(token) == int(engine.target_logits(anchor_B[row]).argmax())
                anchor_B[row] = token
            accepted += length - 1
    assert accepted > 0, "nothing was accepted, so the test shows little"


def test_ranks_that_differ_return_what_group_rank_0_does(specsync_fake_ranks, specsync_fake_engine):
    (_, ours), (_, theirs) = specsync_fake_ranks(decode, 2, args=(specsync_fake_engine, Skew(target=3.0, generator=1)))
    for mine, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(mine.tensors[name], other.tensors[name]) for name in mine.tensors)
