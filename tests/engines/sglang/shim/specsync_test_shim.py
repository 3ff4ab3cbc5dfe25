"""TEST ONLY. A plugin that opens SGLang's speculative paths on CPU, and makes rank 1's logits differ.

Found by its metadata beside it when this folder is on PYTHONPATH. The file ``SHIM_ROUND`` holds the round's number
and rank 1's fault: the size of the difference in standard deviations of the logits, or ``draw``, one draw more than
rank 0 from its generator. When the number changes, every rank seeds its generators anew. ``SHIM_TRACE`` is a folder
in which each rank writes the collectives that it enters and leaves.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SPECULATIVE = "sglang.srt.speculative"
NATIVE = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    take_triton_kernels()
    allow_native_draft_backend()
    if folder := os.environ.get("SHIM_TRACE"):
        trace_collectives(Path(folder))
    around = {
        f"{NATIVE}.forward_extend": extend,
        "sglang.srt.arg_groups.speculative_hook._handle_dspark": pass_device_gate,
        "sglang.srt.arg_groups.speculative_hook._handle_dflash": pass_device_gate,
        "sglang.srt.distributed.parallel_state.GroupCoordinator.all_gather_into_tensor": gather_on_gloo,
        f"{SPECULATIVE}.eagle_utils.eagle_sample": skew_tree_logits,
        f"{SPECULATIVE}.draft_utils.DraftBackendFactory.create_decode_backend": native_steps,
        f"{SPECULATIVE}.draft_utils.DraftBackendFactory.create_draft_extend_backend": native_extend,
    }
    for target, hook in around.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    target_forward = "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation"
    HookRegistry.register(target_forward, begin_round, HookType.BEFORE)
    HookRegistry.register(target_forward, skew_block_logits, HookType.AFTER)
    HookRegistry.register(
        "sglang.srt.model_loader.weight_utils.initialize_dummy_weights", wide_weights, HookType.BEFORE
    )
    HookRegistry.register(f"{SPECULATIVE}.ngram_worker.NgramCorpus", HistoryCorpus, HookType.REPLACE)


def take_triton_kernels() -> None:
    """Make the speculative modules choose the Triton kernels, which the interpreter runs on CPU."""
    import torch

    names = (
        "eagle_utils",
        "spec_utils",
        "eagle_worker_common",
        "ngram_worker",
        "eagle_worker_v2",
        "standalone_worker_v2",
    )
    for name in names:
        importlib.import_module(f"{SPECULATIVE}.{name}")
    for name, module in list(sys.modules.items()):
        if name.startswith((SPECULATIVE, "sglang.kernels.ops.speculative")) and hasattr(module, "_is_xpu"):
            module._is_xpu = True
    torch.Tensor.record_stream = lambda self, stream: None


def allow_native_draft_backend() -> None:
    workers = importlib.import_module(f"{SPECULATIVE}.draft_worker_common")
    if hasattr(workers, "DRAFT_ATTENTION_BACKEND_CHOICES"):  # 0.5.23
        workers.DRAFT_ATTENTION_BACKEND_CHOICES.append("torch_native")
    else:
        workers._SUPPORTED_DRAFT_BACKENDS = (*workers._SUPPORTED_DRAFT_BACKENDS, "torch_native")


class _CpuThatPassesForCuda(str):
    def startswith(self, prefix: Any, *bounds: int) -> bool:
        return "cuda" in (prefix if isinstance(prefix, tuple) else (prefix,)) or super().startswith(prefix, *bounds)


def pass_device_gate(original: Any, server_args: Any) -> Any:
    """Argument handling stops at a device other than CUDA; nothing else of it depends on the device."""
    resolve(server_args, device=_CpuThatPassesForCuda("cpu"))
    result = original(server_args)
    native = "torch_native"
    resolve(server_args, device="cpu", speculative_draft_attention_backend=native, disable_overlap_schedule=True)
    return result


def resolve(server_args: Any, **fields: Any) -> None:
    hook = sys.modules["sglang.srt.arg_groups.speculative_hook"]
    if hasattr(hook, "declare_resolution"):  # 0.5.23 keeps what is resolved apart from what was given
        hook.declare_resolution(server_args, "specsync-test-shim", **fields)
        return
    for name, value in fields.items():
        object.__setattr__(server_args, name, value)


def extend(
    original: Any, self: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True, **kw: Any
) -> Any:
    """Attention of a fixed number of new tokens per request, which this backend knows as a plain extend only."""
    mode = batch.forward_mode
    if mode.is_target_verify():
        count = batch.spec_info.draft_token_num
        prefix_lens, seq_lens = batch.seq_lens, batch.seq_lens + count
    elif mode.is_draft_extend_v2():
        count = q.shape[0] // batch.batch_size
        prefix_lens, seq_lens = batch.seq_lens - count, batch.seq_lens
    else:
        return original(self, q, k, v, layer, batch, save_kv_cache, **kw)
    kept = batch.seq_lens, batch.extend_prefix_lens, batch.extend_seq_lens
    batch.extend_prefix_lens, batch.extend_seq_lens, batch.seq_lens = prefix_lens, seq_lens - prefix_lens, seq_lens
    try:
        return original(self, q, k, v, layer, batch, save_kv_cache, **kw)
    finally:
        batch.seq_lens, batch.extend_prefix_lens, batch.extend_seq_lens = kept


class _Steps:
    """One native backend for each draft step; there is no metadata to make."""

    def __init__(self, runner: Any, steps: int) -> None:
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        self.attn_backends = [TorchNativeAttnBackend(runner) for _ in range(steps)]

    def init_forward_metadata(self, *args: Any, **kwargs: Any) -> None:
        pass

    init_forward_metadata_out_graph = init_forward_metadata_in_graph = init_forward_metadata

    def init_cuda_graph_state(self, *args: Any, **kwargs: Any) -> None:
        pass


def native_steps(original: Any, factory: Any) -> Any:
    steps = factory.speculative_num_steps
    return None if steps <= 1 else _Steps(factory.draft_model_runner, steps - 1)


def native_extend(original: Any, factory: Any) -> Any:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    return TorchNativeAttnBackend(factory.draft_model_runner)


def gather_on_gloo(original: Any, self: Any, output: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
    import torch

    if not given.is_cpu:
        return original(self, output, given, *args, **kwargs)
    parts = list(output.view(self.world_size, -1).unbind(0))
    return torch.distributed.all_gather(parts, given.reshape(-1).contiguous(), group=self.device_group)


_round, _skew, _noise = "", 0.0, None


def begin_round(*args: Any, **kwargs: Any) -> None:
    """Take what holds for this round, and begin it as every round began."""
    global _round, _skew, _noise
    import torch

    path = Path(os.environ["SHIM_ROUND"])
    said = path.read_text() if path.exists() else ""
    if said == _round:
        return
    _round, fault = said, said.split()[1]
    _noise = torch.Generator().manual_seed(99)
    torch.manual_seed(1)
    _skew = 0.0 if fault == "draw" else float(fault)
    if fault == "draw" and is_rank_1():
        torch.rand(1)


def is_rank_1() -> bool:
    from sglang.srt.runtime_context import get_parallel

    return bool(get_parallel().tp_group.rank_in_group == 1)


def skew(logits: Any) -> None:
    """Change rank 1's logits in place: what an inexact all-reduce does, before anything is decided from them."""
    import torch

    if _skew and is_rank_1():
        logits.add_(torch.randn(logits.shape, generator=_noise).to(logits.dtype) * _skew * logits.std())


def skew_tree_logits(
    original: Any, verify_input: Any, batch: Any, logits_output: Any, *args: Any, **kwargs: Any
) -> Any:
    if not batch.forward_mode.is_idle():
        skew(logits_output.next_token_logits)
    return original(verify_input, batch, logits_output, *args, **kwargs)


def skew_block_logits(result: Any, worker: Any, *args: Any, **kwargs: Any) -> None:
    batch = kwargs.get("forward_batch")
    if kwargs.get("is_verify") and batch is not None and batch.spec_algorithm.is_dflash_family():
        skew(result.logits_output.next_token_logits)


def wide_weights(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Dummy weights are so small by default that every token is as likely as another."""
    kwargs.setdefault("low", -0.4)
    kwargs.setdefault("high", 0.4)
    return args, kwargs


def trace_collectives(folder: Path) -> None:
    """Write each collective's name and payload on entering it, and the end of the line on leaving it."""
    import torch.distributed

    files: dict[int, int] = {}

    def write(text: str) -> None:
        rank = torch.distributed.get_rank()
        if rank not in files:
            files[rank] = os.open(folder / f"rank-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(files[rank], text.encode())

    def traced(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def enter(*args: Any, **kwargs: Any) -> Any:
            given = kwargs.get("tensor", args[0] if args else None)
            shape = f" {given.dtype} {list(given.shape)}".replace("torch.", "") if hasattr(given, "shape") else ""
            write(f"{name}{shape}")
            result = collective(*args, **kwargs)
            write("\n")
            return result

        return enter

    for name in ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "gather", "barrier"):
        setattr(torch.distributed, name, traced(name, getattr(torch.distributed, name)))
    from specsync_core.local_wire import LocalWire

    for name in ("broadcast", "gather"):
        setattr(LocalWire, name, traced(f"specsync's {name}", getattr(LocalWire, name)))


class HistoryCorpus:
    """Drafts what followed the last token before; stands in for the engine's C++ trie, with its interface."""

    def __init__(self, *args: Any, draft_token_num: int = 4, **kwargs: Any) -> None:
        self._count = draft_token_num

    def batch_get(self, request_ids: Any, histories: Any, total_lens: Any) -> Any:
        import numpy as np

        drafts = [draft for history in histories for draft in self._draft(list(history))]
        mask = np.tril(np.ones((self._count, self._count), dtype=bool)).reshape(-1)
        return np.array(drafts, dtype=np.int64), np.tile(mask, len(histories))

    def _draft(self, history: list[int]) -> list[int]:
        last = history[-1]
        places = [place for place, token in enumerate(history[:-1]) if token == last]
        follow = history[places[-1] + 1 : places[-1] + self._count] if places else []
        return [last, *follow, *[0] * (self._count - 1 - len(follow))]

    def synchronize(self) -> None:
        pass

    def batch_put(self, batch: Any) -> None:
        pass

    def erase_match_state(self, requests: Any) -> None:
        pass

    def reset(self) -> None:
        pass
