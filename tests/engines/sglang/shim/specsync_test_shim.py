"""TEST ONLY. A plugin that opens SGLang's speculative paths on CPU, and makes rank 1's logits differ.

Found by its metadata beside it when this folder is on PYTHONPATH. ``SHIM_SKEW`` is the size of the difference in
standard deviations of the logits (unset: none), ``SHIM_WEIGHTS`` the range of the dummy weights.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

SPECULATIVE = "sglang.srt.speculative"
NATIVE = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    take_triton_kernels()
    allow_native_draft_backend()
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
    HookRegistry.register(
        "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation", skew_block_logits, HookType.AFTER
    )
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
    workers._SUPPORTED_DRAFT_BACKENDS = (*workers._SUPPORTED_DRAFT_BACKENDS, "torch_native")


class _CpuThatPassesForCuda(str):
    def startswith(self, prefix: Any, *bounds: int) -> bool:
        return prefix == "cuda" or super().startswith(prefix, *bounds)


def pass_device_gate(original: Any, server_args: Any) -> Any:
    """Argument handling stops at a device other than CUDA; nothing else of it depends on the device."""
    object.__setattr__(server_args, "device", _CpuThatPassesForCuda("cpu"))
    result = original(server_args)
    object.__setattr__(server_args, "device", "cpu")
    object.__setattr__(server_args, "speculative_draft_attention_backend", "torch_native")
    object.__setattr__(server_args, "disable_overlap_schedule", True)
    return result


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


_noise: Any = None


def skew(logits: Any) -> None:
    """Change rank 1's logits in place: what an inexact all-reduce does, before anything is decided from them."""
    global _noise
    import torch
    from sglang.srt.runtime_context import get_parallel

    size = float(os.environ.get("SHIM_SKEW", "0"))
    if size and get_parallel().tp_group.rank_in_group == 1:
        _noise = _noise or torch.Generator().manual_seed(99)
        logits.add_(torch.randn(logits.shape, generator=_noise).to(logits.dtype) * size * logits.std())


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
    wide = float(os.environ.get("SHIM_WEIGHTS", "0.4"))
    kwargs.setdefault("low", -wide)
    kwargs.setdefault("high", wide)
    return args, kwargs


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
