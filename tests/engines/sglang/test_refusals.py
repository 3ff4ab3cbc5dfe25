"""An engine that is not as known: one clear error on every rank, or a warning on every rank and no hook there."""

from __future__ import annotations

import json
import subprocess
from functools import cache
from typing import Any

import pytest

from tests.engines.sglang.environment import HERE, is_built, python_of

VERSION = "0.5.17"
ALL = [
    *("eagle_sample", "forward", "draft_forward", "select_top_k_tokens", "draft_topk1_postprocess"),
    "build_tree_kernel_efficient",
]

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not is_built(VERSION), reason=f"no environment of sglang {VERSION}: run `make test-engines`"),
]


@cache
def answers() -> dict[str, list[dict[str, Any]]]:
    command = [str(python_of(VERSION)), "refusals.py"]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def both(case: str, *, strict: bool) -> list[dict[str, Any]]:
    return answers()[f"{case}, strict {int(strict)}"]


@pytest.mark.parametrize("strict", [True, False])
def test_the_engine_as_known_starts(strict):
    for rank in both("as_known", strict=strict):
        assert rank == {"said": None, "warned": "", "hooked": ALL}


@pytest.mark.parametrize(
    ("case", "said", "hooked"),
    [
        ("signature_changed_on_rank_1", "group rank 1: sglang.srt.speculative.eagle_utils.eagle_sample: its", ALL[1:]),
        ("target_absent_everywhere", "every rank: sglang.srt.speculative.eagle_utils.build_tree", ALL[:-1]),
        ("version_unknown", "every rank: sglang 0.5.99 is not known; known are 0.5.16, 0.5.17", ALL[2:]),
        ("hook_cannot_be_applied", "group rank 1: sglang.srt.speculative.eagle_utils.eagle_sample", ALL[1:]),
    ],
)
def test_what_is_not_as_known_stops_every_rank_or_warns_every_rank(case, said, hooked):
    stopped = both(case, strict=True)
    assert stopped[0]["said"] == stopped[1]["said"]
    assert stopped[0]["said"].startswith("EngineError: ")
    assert said in stopped[0]["said"]
    for rank in both(case, strict=False):
        assert rank["said"] is None
        assert said in rank["warned"]
        assert rank["hooked"] == hooked


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("policy_wrong_on_rank_1", "group rank 1: PolicyError: SPECSYNC_SITES: unknown token 'eagle-targe'"),
        ("environment_wrong_on_rank_1", "group rank 1: PolicyError: SPECSYNC_TIMEOUT_S: takes a number of seconds"),
        ("policies_differ", "eagle-target mode: sync on group rank 0, off on group rank 1"),
    ],
)
def test_a_wrong_policy_stops_every_rank_whatever_is_asked(case, said, strict):
    stopped = both(case, strict=strict)
    assert stopped[0]["said"] == stopped[1]["said"]
    assert said in stopped[0]["said"]
