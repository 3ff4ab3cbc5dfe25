"""`conformance_on_ranks` on real processes over gloo: the same trials, and the same judgement on every rank."""

from __future__ import annotations

import pytest
import torch

from specsync_core import TorchGroup
from specsync_core.testing import RankError, Scenario, conformance_on_ranks, run_ranks
from specsync_core.testing.conformance import GREEDY, SAMPLED

SOME = (Scenario(GREEDY), Scenario(SAMPLED, folded=True), Scenario(SAMPLED, simulated_accept_len=1.5))


def conform(rank: int, world_size: int, name: str) -> tuple[set[str], int]:
    report = conformance_on_ranks(
        name, TorchGroup(), torch.device("cpu"), scenarios=SOME[: 1 if name == "eagle" else 3]
    )
    return set(report.calls), report.trials


def test_a_plugin_that_keeps_the_rules_does_so_on_every_rank() -> None:
    (calls, trials), others = run_ranks(conform, 2, timeout_s=60, args=("dflash",))
    assert (calls, trials) == others
    assert {"dflash-accept-greedy", "dflash-accept-simulated", "dflash-draft-greedy"} <= calls


def test_a_broken_rule_is_raised_on_every_rank() -> None:
    with pytest.raises(RankError, match="rule 'covered', site eagle-verify-sample: it is declared, and nothing"):
        run_ranks(conform, 2, timeout_s=60, args=("eagle",))
