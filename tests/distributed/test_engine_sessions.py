"""The recorder, the watchdog and faults of the environment inside vLLM's adapter, over a stand-in for the engine."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from specsync_core.diagnostics.dump import read_dump
from specsync_core.diagnostics.runs import examine_runs, runs_in
from specsync_core.testing import RankError, run_ranks

RUNNER = "vllm.v1.worker.gpu_model_runner"
STEP = SimpleNamespace(total_num_scheduled_tokens=1, scheduled_spec_decode_tokens=())


def make_vllm(rank: int, world_size: int) -> Any:
    """What the adapter needs of vLLM, by name only; step 3 of rank 0 sticks in a collective of the engine's own."""

    class GPUModelRunner:
        steps = 0

        def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
            return SimpleNamespace(sampled_token_ids=torch.tensor([[7, -1]], dtype=torch.int32))

        def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
            return True

        def execute_model(self, scheduler_output: Any) -> Any:
            self.steps += 1
            if self.steps == 3 and rank == 0:
                dist.all_reduce(torch.ones(1))
            return self._sample(None, None)

    class NgramProposer:
        def propose(self, sampled_token_ids: Any, *args: Any) -> list[list[int]]:
            return [[1]]

    coordinator = SimpleNamespace(
        world_size=world_size, rank_in_group=rank, ranks=list(range(world_size)), device=torch.device("cpu"),
        cpu_group=dist.group.WORLD, device_group=dist.group.WORLD,
    )  # fmt: skip
    platform = SimpleNamespace(is_rocm=lambda: False, is_cuda=lambda: False, is_xpu=lambda: False, is_cpu=lambda: True)
    contents: dict[str, dict[str, Any]] = {
        **{name: {"__path__": []} for name in ("vllm", "vllm.v1", "vllm.v1.worker", "vllm.v1.spec_decode")},
        "vllm.distributed": {"__path__": []},
        "vllm.distributed.parallel_state": {
            "get_tp_group": lambda: coordinator,
            "get_pp_group": lambda: SimpleNamespace(is_last_rank=True),
        },
        "vllm.platforms": {"current_platform": platform},
        RUNNER: {"GPUModelRunner": GPUModelRunner},
    }
    for name, values in contents.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(values)
    return GPUModelRunner()


def serve(rank: int, world_size: int) -> None:
    from specsync_core.engines import vllm, vllm_adapter

    runner = make_vllm(rank, world_size)
    vllm_adapter.engine_version = lambda: "0.32.0"  # type: ignore[attr-defined]
    assert vllm
    config = SimpleNamespace(
        model_config=SimpleNamespace(model="m"),
        speculative_config=SimpleNamespace(method="eagle", num_speculative_tokens=3),
    )
    adapter = vllm_adapter.Adapter(config, runner)
    adapter.start()
    for _ in range(2 + (rank == 0)):
        runner.execute_model(STEP)
    time.sleep(60)


def test_a_hang_in_the_engines_own_collective_and_a_fault_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECSYNC_DUMP_DIR", str(tmp_path))
    monkeypatch.setenv("SPECSYNC_WATCHDOG_S", "0.5")
    monkeypatch.setenv("SPECSYNC_FAULTS", "vllm-tokens:rank=1:step=2:index=0:add=1")
    monkeypatch.setenv("SPECSYNC_ALLOW_FAULTS", "1")
    with pytest.raises(RankError, match="did not finish"):
        run_ranks(serve, 2, timeout_s=4.0, group_timeout_s=60.0)
    [folder] = runs_in(tmp_path)
    stuck, peer = (read_dump(folder / f"rank-{rank:04d}.dump.json") for rank in range(2))
    assert (stuck.inside, peer.inside) == (("engine step",), ())
    assert any("in execute_model" in frame for frame in stuck.stacks_of("MainThread"))
    [run], _ = examine_runs(tmp_path)
    assert run.diagnosis.finding == "hang"
    assert run.diagnosis.headline.startswith(
        "Hang, not at a declared site (rank 0 in engine step (GPUModelRunner.execute_model))"
    )
    assert run.diagnosis.healed == {"vllm-tokens": 1}
    assert "vllm-tokens (sync): 1 mismatch in 4 checks, first in step 2, call 2" in run.diagnosis.text
