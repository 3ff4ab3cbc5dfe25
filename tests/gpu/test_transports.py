"""The transports on real GPUs. Skipped where there are fewer than two; `tests/gpu/run.sh` fails if none ran."""

import importlib.util

import pytest
import torch

from specsync_core.testing import RankError, run_ranks
from tests.gpu import checks

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.skipif(GPUS < 2, reason=f"needs two CUDA GPUs; there are {GPUS}"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]

HEALTHY = (
    "one_shot_eager", "one_shot_captured", "grouped_eager", "grouped_captured", "group_eager", "group_captured",
    "sizes", "many_tensors", "interleaved", "back_pressure", "counters", "modes_and_transports", "auto_says_why",
    "one_stream", "own_communicator", "fused_draw", "stress",
)  # fmt: skip
FAILING = ("mismatched_call", "root_never_comes", "peer_never_comes", "host_halts_it")
_results: dict[tuple[str, ...], list[dict[str, list[str]]] | RankError] = {}


def found(names: tuple[str, ...], name: str) -> list[list[str]]:
    """What each rank found in one check; the checks of one tuple share their processes."""
    if names not in _results:
        try:
            _results[names] = run_ranks(checks.run_checks, 2, 400, (names,), group_timeout_s=60)
        except RankError as error:
            _results[names] = error
    result = _results[names]
    if isinstance(result, RankError):
        raise result
    return [rank.get(name, ["did not run: an earlier check ended the run"]) for rank in result]


@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_group(name):
    assert found(HEALTHY, name) == [[], []]


@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", FAILING)
def test_a_group_that_fails_stops_on_every_rank_within_bounds(name):
    assert found(FAILING, name) == [[], []]


@pytest.mark.timeout(300)
def test_a_subgroup_whose_first_member_is_not_global_rank_0():
    for results in run_ranks(checks.subgroup, 3, 250, group_timeout_s=60)[1:]:
        assert results == {"one-shot": [], "grouped": [], "group": []}
