"""What every scenario needs: inputs that are equal on all ranks, the noise that makes them differ, and a notebook.

Shapes: B requests, G drafted tokens, S = G + 1 verify stride, V vocabulary.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

B, G, V = 6, 4, 64
S = G + 1
CREATED = SimpleNamespace(model_path="tiny", enable_multi_layer_eagle=False)
"""What the worker's factory reads of the server's arguments."""


class Case:
    """One rank's run of one scenario."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.values: dict[str, list[Any]] = {}
        """By decision: what this rank ended with."""
        torch.manual_seed(0)
        self.anchor_B = torch.randint(0, V, (B,))
        self.draft_BG = torch.randint(0, V, (B, G))
        self.candidates_BS = torch.cat([self.anchor_B[:, None], self.draft_BG], 1)
        target_BSV = torch.randn(B, S, V)
        target_BSV[:, :-1].scatter_add_(2, self.draft_BG[..., None], torch.full((B, G, 1), 3.0))  # drafts are likely
        self.target_BSV = target_BSV + self.noise(B, S, V)
        self.seq_lens_B = torch.arange(10, 10 + B)

    def noise(self, *shape: int, scale: float = 0.8) -> torch.Tensor:
        """Normal noise that is another one on every rank: what an inexact all-reduce does, only larger."""
        return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 + self.rank)) * scale

    def shift_generator(self) -> None:
        """Give this rank's default generator a state of its own, as one draw too many does."""
        torch.manual_seed(77 + self.rank)

    def record(self, decision: str, *values: Any) -> None:
        self.values[decision] = [value.tolist() if hasattr(value, "tolist") else value for value in values]


def create_worker(algorithm: str) -> type:
    """Go through the engine's own plugin loader and worker factory, as a scheduler process does."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    load_plugins()
    return SpeculativeAlgorithm.from_string(algorithm).create_worker(CREATED)


def sampling_info(*, greedy_rows: str) -> SimpleNamespace:
    """What a batch asks for: ``greedy_rows`` is all, none or some."""
    top_k = 1 if greedy_rows == "all" else 1 << 30
    top_ks_B = torch.full((B,), top_k, dtype=torch.int32)
    if greedy_rows == "some":
        top_ks_B[0] = 1
    return SimpleNamespace(
        is_all_greedy=greedy_rows == "all",
        is_any_greedy=greedy_rows != "none",
        temperatures=torch.full((B, 1), 1.3),
        top_ks=top_ks_B,
        top_ps=torch.ones(B),
        min_ps=torch.zeros(B),
        need_top_k_sampling=False,
        need_top_p_sampling=False,
        need_min_p_sampling=False,
        sampling_seed=None,
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
        logit_bias=None,
        grammars=None,
        has_custom_logit_processor=False,
        return_sampling_masks=None,
        has_watermark_candidates=False,
        sampling_mask_batch_indices=None,
        sampling_support_logprobs_capture_indices=None,
        npu_top_k_top_p_eligible=False,
        max_top_k=None,
    )


def sample_first_tokens(case: Case) -> None:
    """The engine's sampler after prefill, greedy and at a temperature."""
    from sglang.srt.layers.sampler import Sampler
    from sglang.srt.runtime_context import get_parallel

    sampler = object.__new__(Sampler)
    torch.nn.Module.__init__(sampler)
    sampler.tp_sync_group = get_parallel().tp_group.device_group
    sampler.__dict__.update(
        rl_on_policy_target=None, enable_deterministic=False, use_ascend_backend=False, use_log_softmax_logprob=False
    )
    for name, rows in (("greedy", "all"), ("sampled", "none")):
        case.shift_generator()
        logits = SimpleNamespace(next_token_logits=case.target_BSV[:, 0].clone())
        tokens_B = sampler(logits, sampling_info(greedy_rows=rows), False, [0] * B, [None] * B, case.seq_lens_B)
        case.record(f"first token, {name}", tokens_B)


def starve(case: Case, free_gib: float) -> None:
    """Let this host report 8 GiB free on rank 0 and ``free_gib`` on every other."""
    from sglang.srt.utils import common

    memory = SimpleNamespace(available=int((free_gib if case.rank else 8) * 2**30))
    common.psutil.virtual_memory = lambda: memory
    common.get_cpu_ids_by_node = lambda: ["0"]


def measure_memory(case: Case, site: str) -> None:
    """The memory gate of a release that has the published fix: its own min-reduction, over the capture group."""
    from sglang.srt.layers.dp_attention import get_dp_tp_group
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.speculative.spec_tp_sync import SpecTpSync, SpecTpSyncSite

    starve(case, 0.5)
    sync = SpecTpSync(get_dp_tp_group())
    free_gib = sync.available_memory_gb(SpecTpSyncSite[site], "cpu", 0, group=get_parallel().tp_group)
    case.record("capture the draft graph", free_gib >= 1.0)


class LateEvent:
    """A copy to the host that has ended on rank 0 and is under way elsewhere."""

    def __init__(self, rank: int) -> None:
        self.done = rank == 0

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


def resolve_confidences(case: Case) -> None:
    """Whether DSpark's planner gets its confidences: a rank without them makes no plan, and broadcasts none."""
    from sglang.srt.managers.overlap_utils import ConfidenceRelay

    pool = SimpleNamespace(req_generation=torch.ones(8, dtype=torch.int64))
    relay = ConfidenceRelay(device=torch.device("cpu"), req_pool_size=8, pool=pool)
    relay.initialized = True
    relay.conf_ring = torch.full((3, 8, G), 0.5)
    relay.gen_ring = torch.ones(3, 8, dtype=torch.int64)
    relay.copy_done = [LateEvent(case.rank) for _ in range(3)]
    relay.ring_pos = 5
    batch = SimpleNamespace(
        spec_info=SimpleNamespace(future_indices=torch.arange(2)), req_pool_indices_cpu=torch.arange(2)
    )
    resolved = relay.resolve(batch, stream=object(), publish_ready=object())
    case.record("plan or none, when confidences are late", resolved is None)
