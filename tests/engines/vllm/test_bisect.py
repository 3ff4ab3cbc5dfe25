"""``specsync bisect`` on the real engine: the drafter gate, flipped once on rank 1, is the decision that hangs vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.vllm.environment import HERE, NEWEST, environment, models_path

GATE, OTHERS = "vllm-drafter-gate", ("vllm-draft-step", "vllm-tokens")
HANG_S = 20
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
    speculation = {"method": "eagle", "model": str(models / "eagle"), "num_speculative_tokens": 3}
    job = {
        "model": str(models / "target"),
        "speculation": speculation | {"draft_tensor_parallel_size": 2},
        "rounds": ["gate@4"],
        "tokens": 16,
        "max_len": 512,
        "prompt_times": 1,
    }
    variables = {
        "PYTHONPATH": str(HERE / "shim"),
        "PATH": f"{environment(NEWEST).path / 'bin'}:{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1" if (os.cpu_count() or 1) > 1 else "0|0",
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(HANG_S),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCHDYNAMO_DISABLE": "1",
        "NUMBA_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "SPECSYNC_TIMEOUT_S": "120",
    }
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
    assert done.returncode == 0
    report = json.loads((tmp_path / "specsync-bisect.json").read_text())
    assert [each["sites"] for each in report["answer"]["sets"]] == [[GATE]]
    trials = [(sorted(trial["off"]), trial["outcome"]) for trial in report["trials"]]
    assert trials == [([], "good"), (sorted((GATE, *OTHERS)), "bad"), ([GATE], "bad"), (sorted(OTHERS), "good")]
    assert report["trials"][0]["counts"]["differed"] == [GATE]
    assert f"With {GATE} off, 1 of 1 run " in done.stdout
    assert "with everything else off and it on, 0 of " in done.stdout
