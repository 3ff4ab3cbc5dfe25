"""Fork gloo ranks inside an engine's environment: the engine is imported once, each rank loads its plugins itself."""

from __future__ import annotations

import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Mapping
from inspect import signature
from multiprocessing import get_context
from pathlib import Path
from typing import Any

TIMEOUT_S = 120.0


def fork_ranks(
    function: Callable[..., Any], world_size: int, attention_groups: int, environ: Mapping[str, str]
) -> list[Any]:
    """Run ``function(rank)`` on every rank, after SGLang's groups were built, and return the values by rank.

    Args:
        attention_groups: above 1, DP attention is on and each group has an equal share of the ranks.
        environ: variables of the ranks.

    Raises:
        AssertionError: a rank failed or hung; names the rank.
    """
    context = get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            arguments = (sender, function, rank, world_size, attention_groups, environ, Path(folder) / "meet")
            process = context.Process(target=_rank, args=arguments, daemon=True)
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            return [_value(rank, pipe) for rank, pipe in enumerate(pipes)]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _value(rank: int, pipe: Any) -> Any:
    assert pipe.poll(TIMEOUT_S), f"rank {rank} is silent after {TIMEOUT_S:g} s"
    kind, value = pickle.loads(pipe.recv_bytes())
    assert kind == "value", f"rank {rank}:\n{value}"
    return value


def _rank(pipe: Any, function: Any, rank: int, world_size: int, groups: int, environ: Any, meet: Path) -> None:
    try:
        os.environ.update(environ)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        _join(rank, world_size, groups, meet)
        answer = ("value", function(rank))
    except BaseException:
        answer = ("error", traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))


def _join(rank: int, world_size: int, groups: int, meet: Path) -> None:
    from sglang.srt.distributed import parallel_state
    from sglang.srt.runtime_context import get_flags, get_parallel

    parallel_state.init_distributed_environment(
        world_size=world_size,
        rank=rank,
        local_rank=rank,
        backend="gloo",
        distributed_init_method=f"file://{meet}",
    )
    if "tensor_model_parallel_size" in signature(parallel_state.initialize_model_parallel).parameters:
        parallel_state.initialize_model_parallel(world_size, attention_data_parallel_size=groups, backend="gloo")
    else:  # from 0.5.2x on the widths are published first
        ones = {f"{name}_size": 1 for name in ("moe_ep", "pp", "attn_cp", "moe_dp", "attn_dcp")}
        attention = {"attn_dp_size": groups, "attn_tp_size": world_size // groups, "attn_dp_enabled": groups > 1}
        widths = {"tp_size": world_size, "shared_experts_tp_size": None, **ones, **attention}
        get_parallel().override_permanently(**widths)
        parallel_state.initialize_model_parallel(backend="gloo")
    get_flags().dp.enabled = groups > 1
