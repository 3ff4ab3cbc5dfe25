"""The demo engine: a continuous-batching loop that drafts, verifies and commits, on one tensor-parallel rank.

Shape letters as in `specsync_core.algorithm`: B requests, W nodes per request in a verify forward, C committed
tokens at most per step, V vocabulary, N tokens that a forward computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from specsync_core.algorithm import Batch, Draft, Speculator, Verdict
from specsync_core.demo.cache import KVCache, Rows, causal, forward, pad_to_tier, tree
from specsync_core.demo.model import Decoder
from specsync_core.demo.network import DraftModel
from specsync_core.demo.scheduler import Running, Scheduler
from specsync_core.demo.tensor_parallel import Marks, NoMarks

SCRATCH = 64
"""Cache positions behind the committed tokens: for the nodes of a tree, or the paths of a draft."""


class Steps(Protocol):
    """The step counter of `specsync_core.SpecTpSync`."""

    def next_step(self) -> object: ...


@dataclass
class Outcome:
    """What a run produced on this rank."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    """Output tokens by request, finished or not."""
    step_s: list[float] = field(default_factory=list)
    """Seconds per decode step, prefills excluded."""
    committed: int = 0
    """Tokens that decode steps committed, over all requests."""
    rows: int = 0
    """Requests decoded, over all steps."""

    @property
    def steps(self) -> int:
        return len(self.step_s)

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens that a request gains in a step; 1 without speculation."""
        return self.committed / self.rows if self.rows else 0.0


class Engine:
    """One rank of the engine.

    Args:
        target: this rank's part of the model that decides.
        draft: this rank's part of the draft model; None decodes without one.
        bind: makes the speculator, given the draft network.
        max_len: prompt and output of the longest request, in tokens.
        tier: a verify forward with planned lengths computes a multiple of so many tokens.
        counter: its ``next_step`` is called once per decode step; a `SpecTpSync`.
        marks: marks where the host waits for the device's results.
    """

    def __init__(
        self,
        target: Decoder,
        draft: Decoder | None,
        bind: Callable[[DraftModel | None], Speculator],
        scheduler: Scheduler,
        *,
        slots: int,
        max_len: int,
        tier: int = 8,
        counter: Steps | None = None,
        marks: Marks | None = None,
    ) -> None:
        self._target = target
        self._cache = KVCache(target, slots, max_len + SCRATCH)
        self._draft = DraftModel(draft, KVCache(draft, slots, max_len + SCRATCH), self._find_rows) if draft else None
        self._speculator = bind(self._draft)
        self._scheduler = scheduler
        self._tier = tier
        self._counter = counter
        self._marks = marks or NoMarks()
        self._by_id: dict[int, Running] = {}

    @property
    def device(self) -> torch.device:
        return self._target.device

    @torch.inference_mode()
    def run(self, steps: int | None = None, on_step: Callable[[int], None] | None = None) -> Outcome:
        """Decode until the scheduler is idle or ``steps`` decode steps are done; a collective of all ranks."""
        outcome = Outcome()
        while not self._scheduler.idle and (steps is None or outcome.steps < steps):
            if admitted := self._scheduler.admit():
                self._prefill(admitted)
                self._retire(outcome)
            if not self._scheduler.running:
                continue
            begin = time.perf_counter()
            commit_lens = self._decode(self._scheduler.running)
            outcome.step_s.append(time.perf_counter() - begin)
            outcome.committed += sum(commit_lens)
            outcome.rows += len(commit_lens)
            self._retire(outcome)
            if self._counter is not None:
                self._counter.next_step()
            if on_step is not None:
                on_step(outcome.steps)
        outcome.tokens |= {running.request.request_id: running.tokens for running in self._scheduler.running}
        return outcome

    def _retire(self, outcome: Outcome) -> None:
        for running in self._scheduler.retire():
            outcome.tokens[running.request.request_id] = running.tokens

    def _prefill(self, admitted: Sequence[Running]) -> None:
        """Compute the prompts' KV, and the first token of each request."""
        lengths = [len(running.request.prompt) for running in admitted]
        width = max(lengths)
        padded = [running.request.prompt + (0,) * (width - len(running.request.prompt)) for running in admitted]
        tokens_BT = torch.tensor(padded, device=self.device)
        index_N = torch.tensor(pad_to_tier(lengths, width, 1), device=self.device)
        lens_B = torch.zeros(len(admitted), dtype=torch.int64, device=self.device)
        rows = Rows(torch.tensor([running.slot for running in admitted], device=self.device), lens_B, 0)
        depth_BT, sees_BTT = causal(len(admitted), width, self.device)
        hidden_ND = forward(self._target, self._cache, rows, tokens_BT, depth_BT, sees_BTT, index_N)
        if self._draft is not None:
            self._draft.extend(rows, tokens_BT, index_N)
        last_B = torch.tensor(lengths, device=self.device).cumsum(0) - 1
        logits_BV = self._target.logits(hidden_ND[last_B])
        first_B = self._speculator.first_token(self._batch(admitted, torch.zeros_like(last_B), last_B), logits_BV)
        for running, token in zip(admitted, self._read(first_B, "first tokens"), strict=True):
            running.output.append(token)

    def _decode(self, running: Sequence[Running]) -> list[int]:
        """One step for every running request; returns how many tokens each gained on this rank."""
        self._by_id = {each.request.request_id: each for each in running}
        anchor_B = torch.tensor([each.output[-1] for each in running], device=self.device)
        rows = self._find_rows(list(self._by_id))
        batch = self._batch(running, anchor_B, rows.lens_B)
        draft = self._speculator.draft(batch)
        verdict = self._speculator.accept(batch, draft, self._verify(rows, draft))
        self._cache.keep_path(rows, verdict.path_BC)
        if self._draft is not None:
            behind_anchor_BC = verdict.tokens_BC[:, :-1].clamp(min=0)
            self._draft.extend(rows, torch.cat((anchor_B[:, None], behind_anchor_BC), dim=1))
        return self._commit(running, verdict)

    def _verify(self, rows: Rows, draft: Draft) -> Tensor:
        """One target forward over all nodes: float ``[B, W, V]``, NaN for nodes that the plan leaves out."""
        size, width = draft.tokens_BW.shape
        depth_BW, sees_BWW = tree(draft.parents_BW)
        index = list(range(size * width))
        if draft.verify_lens_B is not None:
            index = pad_to_tier(self._read(draft.verify_lens_B, "verify lengths"), width, self._tier)
        index_N = torch.tensor(index, device=self.device)
        hidden_ND = forward(self._target, self._cache, rows, draft.tokens_BW, depth_BW, sees_BWW, index_N)
        logits_NV = self._target.logits(hidden_ND)
        logits = logits_NV.new_full((size * width, logits_NV.shape[1]), float("nan"))
        logits[index_N] = logits_NV
        return logits.view(size, width, -1)

    def _commit(self, running: Sequence[Running], verdict: Verdict) -> list[int]:
        commit_lens = self._read(verdict.commit_lens_B, "committed lengths")
        for each, tokens, length in zip(running, verdict.tokens_BC.tolist(), commit_lens, strict=True):
            each.output += tokens[:length]
        return commit_lens

    def _read(self, tensor: Tensor, what: str) -> list[int]:
        """Bring a tensor to the host. On a GPU this is where a rank is found whose captured collective hangs."""
        with self._marks.waiting("device results", what):
            values: list[int] = tensor.tolist()
        return values

    def _batch(self, running: Sequence[Running], anchor_B: Tensor, prefix_lens_B: Tensor) -> Batch:
        temperatures = [each.request.temperature for each in running]
        return Batch(
            request_ids=tuple(each.request.request_id for each in running),
            anchor_B=anchor_B,
            prefix_lens_B=prefix_lens_B,
            temperatures_B=torch.tensor(temperatures, dtype=torch.float32, device=self.device),
        )

    def _find_rows(self, request_ids: Sequence[int]) -> Rows:
        running = [self._by_id[request_id] for request_id in request_ids]
        lens = [each.prefix_len for each in running]
        slots_B = torch.tensor([each.slot for each in running], device=self.device)
        return Rows(slots_B, torch.tensor(lens, device=self.device), max(lens))
