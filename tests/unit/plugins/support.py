"""What the algorithms' unit tests share: a sync of one rank that keeps what it saw, and a test of distributions."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from specsync_core.payload import find_problem
from specsync_core.registry_files import builtin_registry, merge_registries
from specsync_core.transports.one_shot_draw import draw_then, find_draw_problem

REGISTRY = merge_registries([builtin_registry()])


class LoneSync:
    """Stands in for `SpecTpSync` on one rank: checks each payload against its declaration and remembers the call."""

    def __init__(self, *, free_gib: float = 64.0, overwrite=None) -> None:
        self.calls: list[tuple[str, tuple[Tensor, ...]]] = []
        self.free_gib = free_gib
        self.overwrite = overwrite or {}
        """Slug to a function that changes the tensors in place, as group rank 0's values would."""

    @property
    def slugs(self) -> list[str]:
        return [slug for slug, _ in self.calls]

    def sync(self, slug: str, *tensors: Tensor, logits: Tensor | None = None):
        problem = find_problem(REGISTRY.site(slug), tensors)
        assert problem is None, f"{slug}: {problem}"
        if slug in self.overwrite:
            self.overwrite[slug](*tensors)
        self.calls.append((slug, tuple(tensor.clone() for tensor in tensors)))
        return tensors[0] if len(tensors) == 1 else tensors

    def draw(self, slug: str, scores_BV: Tensor, noise_BV: Tensor | None = None) -> Tensor:
        assert find_draw_problem(scores_BV, noise_BV) is None
        assert scores_BV.stride(1) == 1, "one launch takes rows that are contiguous"
        return self.sync(slug, draw_then(scores_BV, noise_BV))

    def point(self, slug: str):
        return lambda *tensors: self.sync(slug, *tensors)

    def capturing(self):
        return nullcontext()

    def available_memory_gb(self, slug: str, device, gpu_id, group=None) -> float:
        assert REGISTRY.site(slug).kind == "consensus"
        self.calls.append((slug, ()))
        return self.free_gib


def chi_square_p(counts: Tensor, probabilities: Tensor) -> float:
    """The chance of counts at least this far from what the probabilities promise (Pearson's test).

    The rarest cells are counted as one, of which at least 5 draws are expected.
    """
    expected, order = (probabilities.double().flatten() * counts.sum()).sort()
    observed = counts.double().flatten()[order]
    rare = max(int((expected < 5).sum()), int((expected.cumsum(0) < 5).sum()) + 1)
    expected = torch.cat((expected[:rare].sum(0, keepdim=True), expected[rare:]))
    observed = torch.cat((observed[:rare].sum(0, keepdim=True), observed[rare:]))
    assert expected.numel() > 1, "too few draws for this test"
    statistic = ((observed - expected) ** 2 / expected).sum()
    degrees = torch.tensor((expected.numel() - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, statistic / 2))


def assert_distributed(tokens_BN: Tensor, probabilities: Tensor, alpha: float = 1e-4) -> None:
    """Rows of N tokens follow the joint distribution ``[V, ..., V]`` of N tokens. Seeds are fixed, so it is exact."""
    shape = probabilities.shape
    flat_B = torch.zeros(tokens_BN.shape[0], dtype=torch.int64)
    for column, size in zip(tokens_BN.unbind(1), shape, strict=True):
        flat_B = flat_B * size + column
    counts = torch.bincount(flat_B, minlength=probabilities.numel())
    p_value = chi_square_p(counts, probabilities)
    promised = (probabilities.flatten() * len(flat_B)).tolist()
    assert p_value > alpha, f"p = {p_value:.2e}: {counts.tolist()} of {promised}"
