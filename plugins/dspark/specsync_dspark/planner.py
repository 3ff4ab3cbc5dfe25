"""How many tokens of each request's block are verified, and how many of the batch are worth it.

A plan that ends a block must not know the draft behind its end. Whether a draft is verified may depend on the drafts
before it, on other requests and on earlier steps; were the draft's own token to decide, unlikely tokens would be
skipped more often than others, and sampled output would no longer follow the target. So a confidence looks at what
is before its draft only, and the budget at the confidences of an earlier step.

Shape letters: B requests, G drafted tokens per block, V vocabulary.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from specsync_core import SpecTpSync


@dataclass(frozen=True)
class VerifyLimits:
    """Bounds of a request's verify length, which counts the anchor."""

    max_len: int
    min_len: int = 1
    survival_eps: float = 1e-6
    """Drafts less likely than this to be reached are never verified for a budget's sake."""

    def __post_init__(self) -> None:
        if not 0 <= self.min_len <= self.max_len or self.max_len < 1:
            raise ValueError(
                f"VerifyLimits: min_len={self.min_len}, max_len={self.max_len}: need 0 <= min_len <= max_len and"
                " max_len >= 1 (the anchor counts)."
            )


@dataclass(frozen=True)
class CostTable:
    """Measured verify steps per second by the number of tokens in the batch. The same on every rank."""

    batch_tokens: tuple[int, ...]
    """Ascending."""
    steps_per_second: tuple[float, ...]

    def __post_init__(self) -> None:
        ascending = all(low < high for low, high in zip(self.batch_tokens, self.batch_tokens[1:], strict=False))
        if not self.batch_tokens or len(self.batch_tokens) != len(self.steps_per_second) or not ascending:
            raise ValueError(
                f"CostTable: batch_tokens={self.batch_tokens} must ascend and have one entry for each of"
                f" steps_per_second={self.steps_per_second}."
            )

    def lookup(self, tokens: int) -> float:
        """The speed of the smallest measured batch that holds so many tokens, as a graph is padded up to its size."""
        return self.steps_per_second[min(bisect_left(self.batch_tokens, tokens), len(self.batch_tokens) - 1)]


def step_confidence(step_logits_BGV: Tensor) -> Tensor:
    """How sure the draft is at each step, before it draws: the probability of its likeliest token, ``[B, G]``.

    Where a row is greedy that is the probability of its token. The logits depend on the tokens drawn before.
    """
    return torch.softmax(step_logits_BGV.float(), dim=-1).amax(dim=-1)


def survival(confidence_BG: Tensor) -> Tensor:
    """The chance that each draft is reached and accepted: the running product of confidence, float32 ``[B, G]``."""
    return confidence_BG.float().cumprod(dim=1)


def plan_verify_lens(survival_BG: Tensor, budget: int, limits: VerifyLimits) -> Tensor:
    """Spend a budget of drafts on the likeliest of the batch: int32 ``[B]``.

    ``clamp(min_len + chosen, max(min_len, 1), max_len)``, where the ``budget`` largest survival values of the
    first ``max_len`` columns, at least ``survival_eps``, are chosen. Equal values are taken by position, then by
    request: a stable order of exact values, never a matter of how a top-k kernel breaks ties.
    """
    batch = survival_BG.shape[0]
    # Position-major, so that the stable sort itself breaks ties by position and then by request.
    flat_N = survival_BG[:, : limits.max_len].t().reshape(-1)
    order_N = torch.sort(flat_N, descending=True, stable=True).indices[: max(budget, 0)]
    worthwhile_N = (flat_N[order_N] >= limits.survival_eps).long()
    chosen_B = torch.zeros(batch, dtype=torch.int64, device=survival_BG.device)
    chosen_B.scatter_add_(0, order_N % max(batch, 1), worthwhile_N)
    return (limits.min_len + chosen_B).clamp(max(limits.min_len, 1), limits.max_len).int()


def verify_lens(sync: SpecTpSync, survival_BG: Tensor, budget: int, limits: VerifyLimits) -> Tensor:
    """The agreed verify lengths, int32 ``[B]`` (site ``dspark-plan``).

    Every rank calls this at every step, whatever its budget: a rank that skipped it would leave its peers inside
    the broadcast.
    """
    lens_B: Tensor = sync.sync("dspark-plan", plan_verify_lens(survival_BG, budget, limits))
    return lens_B


def throughput_budget(survival_BG: Tensor, table: CostTable, limits: VerifyLimits) -> int:
    """The number of drafts to verify that maximises the batch's expected tokens per second.

    ``argmax over m of tau(m) * steps_per_second(B + m)``, with ``tau(m) = B + the sum of the m largest survival
    values``: one token per request is certain, every further draft adds its chance. The smallest m wins a tie.

    Deliberately *not* synced. It is a pure function of values that agree already (drafts agreed token by token,
    the confidence computed from them, the request set, a static table), and broadcasting a host value costs
    blocked host time at every step (about 50 us, measured in an engine) for nothing. Should the confidence differ
    in its bits all the same, the budget may differ; it feeds `verify_lens` alone, which is synced. An engine that
    derives anything else from the budget, such as a graph size, must take it from the synced lengths.

    Args:
        survival_BG: float, of an earlier step; reading it on the host then waits for nothing that is still running.
    """
    batch = survival_BG.shape[0]
    values = survival_BG[:, : limits.max_len].reshape(-1).double().cpu()
    values = values[values >= limits.survival_eps].sort(descending=True).values
    tau = [float(batch), *(batch + values.cumsum(dim=0)).tolist()]
    gains = [expected * table.lookup(batch + drafts) for drafts, expected in enumerate(tau)]
    return max(range(len(gains)), key=gains.__getitem__)


class VerifyPlanner:
    """Plans step by step: this step's confidences share out a budget that the step before has earned."""

    def __init__(self, costs: CostTable, limits: VerifyLimits) -> None:
        self._costs = costs
        self._limits = limits
        self._earlier_ids: tuple[int, ...] = ()
        self._earlier_BG: Tensor | None = None

    def plan(self, sync: SpecTpSync, request_ids: Sequence[int], confidence_BG: Tensor) -> Tensor:
        """The agreed verify lengths of this step: int32 ``[B]``.

        Args:
            request_ids: which request each row is, to find it in the step before; a new one counts as certain.
            confidence_BG: float in [0, 1]; must not depend on the draft that it stands for, see above.
        """
        survival_BG = survival(confidence_BG)
        budget = throughput_budget(self._earlier(request_ids, survival_BG), self._costs, self._limits)
        self._earlier_ids, self._earlier_BG = tuple(request_ids), survival_BG
        return verify_lens(sync, survival_BG, budget, self._limits)

    def _earlier(self, request_ids: Sequence[int], survival_BG: Tensor) -> Tensor:
        if self._earlier_BG is None:
            return torch.ones_like(survival_BG)
        row_of = {request_id: row for row, request_id in enumerate(self._earlier_ids)}
        rows_B = torch.tensor([row_of.get(request_id, -1) for request_id in request_ids], dtype=torch.int64)
        certain_1G = survival_BG.new_ones(1, survival_BG.shape[1])  # the last row, which -1 picks
        return torch.cat((self._earlier_BG, certain_1G))[rows_B.to(survival_BG.device)]
