"""A fake engine: runs an algorithm's decisions against tables of logits, on one rank, and keeps all that follows.

The target is a first-order Markov chain, and so is the draft network's opinion of it. Shape letters as in
`specsync_core.algorithm`: B requests, W nodes per request, V vocabulary, G drafted tokens, P paths, L their lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specsync_core.algorithm import Algorithm, Batch, Draft, SpeculatorContext, Verdict
from specsync_core.sync import SpecTpSync

NOISE = 3.0
"""Standard deviation of a skewed rank's own logits, beside tables of 2: nearly every decision then differs."""


class Scenario(NamedTuple):
    """What the engine decodes, the same on every rank."""

    temperatures: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    """One for each request; 0 is greedy."""
    folded: bool = False
    simulated_accept_len: float | None = None
    steps: int = 3
    gamma: int = 3
    vocab_size: int = 24
    seed: int = 0

    def __str__(self) -> str:
        greedy = [temperature <= 0 for temperature in self.temperatures]
        kind = "greedy" if all(greedy) else "mixed" if any(greedy) else "sampled"
        return f"{kind}{', folded' * self.folded}{', simulated lengths' * (self.simulated_accept_len is not None)}"


class Skew(NamedTuple):
    """In what this rank differs from the others; by default in nothing."""

    draft: float = 0.0
    """Standard deviation of its own noise on the draft network's logits."""
    target: float = 0.0
    """The same, on the target's logits."""
    generator: int = 0
    """Added to the generator's seed."""


@dataclass
class Result:
    """What one call of the algorithm returned, and where."""

    place: str
    """The method and the step, e.g. ``draft in step 0``."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Copies on the host."""


class FakeEngine:
    """One rank of an engine. Ranks that are not skewed decide alike by themselves.

    Args:
        algorithm: what a plugin's ``specsync_algorithm`` hook returns.
        sync: this rank's; over a `FakeGroup`, or over a real group.
        rank: makes the noise of a skew this rank's own.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        sync: SpecTpSync,
        scenario: Scenario | None = None,
        *,
        rank: int = 0,
        skew: Skew | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.scenario = scenario = scenario or Scenario()
        self.skew = skew = skew or Skew()
        self.device = torch.device(device)
        self.place = "bind"
        """What runs now: `Result.place`, for who watches the sync."""
        self._sync = sync
        self._algorithm = algorithm
        self._noise = torch.Generator().manual_seed(7919 * (rank + 1) + scenario.seed)
        self._target_VV = self._table(1, scenario.vocab_size)
        self._context = SpeculatorContext(
            sync=sync,
            network=_Network(self),
            gamma=scenario.gamma,
            vocab_size=scenario.vocab_size,
            max_batch=len(scenario.temperatures) + 2,
            device=self.device,
            gpu_id=self.device.index or 0,
            generator=torch.Generator(self.device).manual_seed(scenario.seed + skew.generator),
            folded=scenario.folded,
            simulated_accept_len=scenario.simulated_accept_len,
        )

    def run(self) -> list[Result]:
        """Bind the algorithm, decode, and return what each of its calls returned."""
        with torch.inference_mode():
            return list(self._run())

    def _run(self) -> Iterator[Result]:
        speculator = self._algorithm.bind(self._context)
        rows = len(self.scenario.temperatures)
        batch = self._batch(torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64))
        self.place = "first token"
        prompts_B = torch.arange(rows, device=self.device)
        first_B = speculator.first_token(batch, self.target_logits(prompts_B))
        yield Result(self.place, _copied(first_token=first_B))
        batch = self._batch(first_B, batch.prefix_lens_B)
        for step in range(self.scenario.steps):
            self.place = f"draft in step {step}"
            draft = speculator.draft(batch)
            yield Result(self.place, _shown_draft(draft))
            self.place = f"accept in step {step}"
            verdict = speculator.accept(batch, draft, self.target_logits(draft.tokens_BW))
            yield Result(self.place, _shown_verdict(verdict))
            batch = self._next(batch, verdict)
            self._sync.next_step()

    def _next(self, batch: Batch, verdict: Verdict) -> Batch:
        last_B1 = verdict.commit_lens_B.unsqueeze(1).clamp(min=1) - 1
        anchor_B = verdict.tokens_BC.gather(1, last_B1).squeeze(1)
        return self._batch(anchor_B, batch.prefix_lens_B + verdict.commit_lens_B)

    def _batch(self, anchor_B: Tensor, prefix_lens_B: Tensor) -> Batch:
        return Batch(
            request_ids=tuple(range(len(anchor_B))),
            anchor_B=anchor_B.to(self.device),
            prefix_lens_B=prefix_lens_B.to(self.device),
            temperatures_B=torch.tensor(self.scenario.temperatures, dtype=torch.float32, device=self.device),
        )

    def target_logits(self, tokens: Tensor) -> Tensor:
        """The target's logits behind each token, with this rank's own noise: float ``[..., V]``."""
        return self.noisy(self._target_VV[tokens], self.skew.target)

    def noisy(self, logits: Tensor, size: float) -> Tensor:
        """Add this rank's own noise, new in every call."""
        if not size:
            return logits
        return logits + size * torch.randn(logits.shape, generator=self._noise).to(self.device)

    def _table(self, seed: int, *shape: int) -> Tensor:
        """Equal on every rank; a likely next token stands out, so that some drafts are accepted."""
        size = self.scenario.vocab_size
        generator = torch.Generator().manual_seed(self.scenario.seed * 31 + seed)
        likely_VV = 4.0 * torch.eye(size).roll(1, dims=1)
        return (2.0 * torch.randn(*shape, size, generator=generator) + likely_VV).to(self.device)


class _Network:
    """The draft network: what it says depends on the last token, and on how far ahead it looks."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        sizes = engine.scenario.vocab_size
        self._ahead = [engine._table(10 + ahead, sizes) for ahead in range(engine.scenario.gamma)]
        self._markov_VV = engine._table(2, sizes)
        self._path_VV = engine._table(3, sizes)

    def block_logits(self, batch: Batch, gamma: int) -> Tensor:
        blocks = [self._ahead[ahead][(batch.anchor_B + ahead) % len(self._markov_VV)] for ahead in range(gamma)]
        return self._engine.noisy(torch.stack(blocks, dim=1), self._engine.skew.draft)

    def markov_logits(self, prev_B: Tensor) -> Tensor:
        # Noise would be a constant of a captured graph.
        return self._markov_VV[prev_B]

    def path_logits(self, batch: Batch, paths_BPL: Tensor) -> Tensor:
        return self._engine.noisy(self._path_VV[paths_BPL[:, :, -1]], self._engine.skew.draft)


def place_order(place: str) -> tuple[int, int]:
    """Sort `Result.place` by when it comes."""
    first, _, step = place.partition(" in step ")
    return int(step or -1), ("bind", "first token", "draft", "accept").index(first)


def _copied(**tensors: Tensor | None) -> dict[str, Tensor]:
    with torch.inference_mode(False):  # copies that a test may write to
        return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items() if tensor is not None}


def _shown_draft(draft: Draft) -> dict[str, Tensor]:
    return _copied(tokens_BW=draft.tokens_BW, parents_BW=draft.parents_BW, verify_lens_B=draft.verify_lens_B)


def _shown_verdict(verdict: Verdict) -> dict[str, Tensor]:
    return _copied(**vars(verdict))


def contract_problem(result: Result, earlier: dict[str, Tensor]) -> str | None:
    """Return how a draft or a verdict breaks the contract of `specsync_core.algorithm`, or None.

    Args:
        earlier: the draft that the verdict is about.
    """
    shown: dict[str, Any] = result.tensors
    floats = [name for name, tensor in shown.items() if tensor.is_floating_point()]
    if floats:
        return f"{floats[0]} holds floating-point numbers"
    if "parents_BW" in shown:
        column_W = torch.arange(shown["parents_BW"].shape[1])
        if not bool((shown["parents_BW"][:, 0] == -1).all()) or not bool((shown["parents_BW"] < column_W).all()):
            return "parents_BW: the anchor's parent is -1, and parents come before their children"
    if "commit_lens_B" not in shown:
        return None
    lens_B, path_BC = shown["commit_lens_B"], shown["path_BC"]
    if not bool((lens_B >= 1).all()):
        return "commit_lens_B: every step commits at least one token, the bonus"
    behind_BC = torch.arange(path_BC.shape[1]) >= lens_B.unsqueeze(1)
    if not bool((path_BC[behind_BC] == -1).all()) or not bool((shown["tokens_BC"][behind_BC] == -1).all()):
        return "tokens_BC and path_BC are -1 behind the committed tokens"
    kept_BC = earlier["tokens_BW"].gather(1, path_BC.clamp(min=0))[:, 1:]
    if not bool((kept_BC == shown["tokens_BC"][:, :-1])[~behind_BC[:, 1:]].all()):
        return "path_BC does not lead through the drafts that tokens_BC commits"
    return None
