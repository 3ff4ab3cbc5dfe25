"""`conformance_on_ranks` on real processes over gloo: the same trials, and the same judgement on every rank."""

from __future__ import annotations

import pytest
import torch
from specsync_dflash.speculator import DFlashSpeculator

from specsync_core import Algorithm, Batch, TorchGroup, decisions, hookimpl
from specsync_core.testing import RankError, Scenario, conformance_on_ranks, run_ranks
from specsync_core.testing.conformance import GREEDY, SAMPLED

SOME = (
    Scenario(GREEDY),
    Scenario(SAMPLED),
    Scenario(SAMPLED, folded=True),
    Scenario(SAMPLED, simulated_accept_len=1.5),
)


def conform(rank: int, world_size: int, plugin: object, scenarios: tuple[Scenario, ...]) -> tuple[set[str], int]:
    report = conformance_on_ranks(plugin, TorchGroup(), torch.device("cpu"), scenarios=scenarios)
    return set(report.calls), report.trials


def test_a_plugin_that_keeps_the_rules_does_so_on_every_rank() -> None:
    (calls, trials), others = run_ranks(conform, 2, timeout_s=60, args=("dflash", SOME))
    assert (calls, trials) == others
    assert {"dflash-accept-greedy", "dflash-accept-simulated", "dflash-draft-greedy"} <= calls


class Forgetful:
    """DFlash, but every rank keeps its own first token."""

    @hookimpl
    def specsync_algorithm(self) -> Algorithm:
        class Speculator(DFlashSpeculator):
            def first_token(self, batch: Batch, target_logits_BV: torch.Tensor) -> torch.Tensor:
                sampling = decisions.Sampling.of(batch.temperatures_B)
                return decisions.sample_tokens(target_logits_BV, sampling, self._context.generator)

        return Algorithm("dflash", "forgets a sync", "block", Speculator)


def test_a_broken_rule_is_raised_on_every_rank() -> None:
    words = "rule 'derived', site -: with other target logits on group rank 1, first_token of group rank 1"
    with pytest.raises(RankError, match=words):
        run_ranks(conform, 2, timeout_s=60, args=(Forgetful(), SOME[1:2]))
