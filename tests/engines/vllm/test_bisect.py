"""``specsync bisect`` on the real engine: the drafter gate, flipped once on rank 1, is the decision that hangs vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.vllm.environment import HERE, NEWEST, environment, models_path
from tests.engines.vllm.matrix import EAGLE
from tests.engines.vllm.matrix import GATE as GATE_FAULT
from tests.engines.vllm.serving import environ_of

GATE, OTHERS = "vllm-drafter-gate", ("vllm-draft-step", "vllm-tokens")
HANG_S = 30
"""After which the engine gives up a step that does not come back, and ends."""

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not environment(NEWEST).is_built(), reason=f"no environment of vllm {NEWEST}: run `make test-engines`"
    ),
]


def engine_command() -> list[str]:
    """One engine that serves three requests, with the fault; it exits with 0 when they are served."""
    models = models_path(NEWEST)
    speculation = EAGLE | {"model": str(models / "eagle"), "draft_tensor_parallel_size": 2}
    job = {
        "model": str(models / "target"),
        "speculation": speculation,
        "rounds": [GATE_FAULT],
        "tokens": 16,
        "max_len": 512,
        "prompt_times": 1,
    }
    variables = {name: value for name, value in environ_of(NEWEST).items() if os.environ.get(name) != value}
    variables |= {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(HANG_S), "SPECSYNC_TIMEOUT_S": "120"}
    settings = [f"{name}={value}" for name, value in variables.items()]
    return ["env", "-C", str(HERE), *settings, str(environment(NEWEST).python), "engine.py", json.dumps(job)]


def test_the_drafter_gate_is_found_and_nothing_else(tmp_path: Path) -> None:
    """One run per set, which is few, for each takes most of a minute; counts alone clear the other sites at first."""
    bisect = [sys.executable, "-m", "specsync_core.cli", "bisect", "--sites", ",".join((GATE, *OTHERS))]
    done = subprocess.run(
        [*bisect, "--runs", "1", "--timeout", "240", "--", *engine_command()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    sys.stderr.write(done.stderr + done.stdout)
    assert done.returncode == 3  # found, and one run each is not sure
    report = json.loads((tmp_path / "specsync-bisect.json").read_text())
    assert [each["sites"] for each in report["answer"]["sets"]] == [[GATE]]
    trials = [(sorted(trial["off"]), trial["outcome"]) for trial in report["trials"]]
    assert trials == [([], "good"), (sorted((GATE, *OTHERS)), "bad"), ([GATE], "bad"), (sorted(OTHERS), "good")]
    assert report["trials"][0]["counts"]["differed"] == [GATE]
    assert f"With {GATE} off, 1 of 1 run " in done.stdout
    assert "with everything else off and it on, 0 of " in done.stdout
