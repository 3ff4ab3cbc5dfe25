"""Fit a target and its draft on text for a short while, in one process, so that acceptance is realistic.

Shape letters: B sequences, T bytes per sequence, K blocks per sequence, G drafted tokens per block, V vocabulary.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from specsync_core.demo.cache import side_by_side
from specsync_core.demo.config import ModelConfig, World
from specsync_core.demo.model import Alone, Decoder, Weights, dense_attention, init_draft, init_target

Report = Callable[[str, int, float], None]
"""Told the model's name, how many steps it has done, and the loss in nats per byte."""

SEQUENCES, LENGTH, BLOCKS = 12, 96, 12
LEARNING_RATE = 4e-3


def train_target(config: ModelConfig, seed: int, text: Sequence[int], steps: int, report: Report) -> Weights:
    """Fit a target to the next byte of ``text``. Float32 on the CPU, deterministic for a seed."""
    weights = init_target(config, seed)
    model = Decoder(config, weights, Alone())

    def loss(tokens_BT: Tensor) -> Tensor:
        logits = _causal_logits(model, tokens_BT[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), tokens_BT[:, 1:].flatten())

    _fit(weights, loss, _batches(text, seed), steps, lambda step, value: report("target", step, value))
    return weights


def train_draft(
    config: ModelConfig,
    target: Weights,
    target_config: ModelConfig,
    kind: Literal["block", "causal"],
    gamma: int,
    seed: int,
    text: Sequence[int],
    steps: int,
    report: Report,
) -> Weights:
    """Fit a draft to its target's own distribution on ``text``, for the kind of draft that an algorithm needs.

    Args:
        config: the draft's shape.
        target: the target's whole weights; they stay as they are.
        gamma: tokens per block, for ``kind`` block.
    """
    weights = init_draft(config, target)
    teacher, student = Decoder(target_config, target, Alone()), Decoder(config, weights, Alone(), "draft")
    generator = torch.Generator().manual_seed(seed)

    def loss(tokens_BT: Tensor) -> Tensor:
        with torch.no_grad():
            wanted_BTV = _causal_logits(teacher, tokens_BT).log_softmax(-1)
        if kind == "causal":
            return _divergence(_causal_logits(student, tokens_BT), wanted_BTV)
        starts_BK = torch.randint(1, tokens_BT.shape[1] - gamma, (len(tokens_BT), BLOCKS), generator=generator)
        places = starts_BK[:, :, None] + torch.arange(gamma)
        wanted = wanted_BTV[torch.arange(len(tokens_BT))[:, None, None], places]
        return _divergence(_block_logits(student, tokens_BT, places), wanted)

    _fit(weights, loss, _batches(text, seed + 1), steps, lambda step, value: report("draft", step, value))
    return weights


def _causal_logits(model: Decoder, tokens_BT: Tensor) -> Tensor:
    batch, length = tokens_BT.shape
    sees_BTT = torch.ones(length, length, dtype=torch.bool).tril().expand(batch, length, length)
    positions_N = torch.arange(length).repeat(batch)
    hidden_ND = model.hidden(tokens_BT.flatten(), positions_N, dense_attention(sees_BTT))
    return model.logits(hidden_ND).view(batch, length, -1)


def _block_logits(model: Decoder, tokens_BT: Tensor, places_BKG: Tensor) -> Tensor:
    """Block and Markov logits of blocks that begin at ``places_BKG[..., 0]``, all in one forward: ``[B, K, G, V]``.

    The text comes first and sees itself causally; each block sees the text before its anchor, and all of itself.
    """
    batch, length = tokens_BT.shape
    blocks, gamma = places_BKG.shape[1:]
    anchors_BK = tokens_BT.gather(1, places_BKG[..., 0])
    block_BKG = torch.full_like(places_BKG, model.config.mask_token)
    block_BKG[..., 0] = anchors_BK
    inputs = torch.cat((tokens_BT, block_BKG.flatten(1)), dim=1)
    positions = torch.cat((torch.arange(length).expand(batch, length), places_BKG.flatten(1)), dim=1)
    sees = torch.zeros(batch, inputs.shape[1], inputs.shape[1], dtype=torch.bool)
    sees[:, :length, :length] = torch.ones(length, length, dtype=torch.bool).tril()
    before_anchor = torch.arange(length) < places_BKG[..., 0].repeat_interleave(gamma, 1)[..., None]
    sees[:, length:, :length] = before_anchor
    sees[:, length:, length:] = side_by_side(torch.ones(gamma, gamma, dtype=torch.bool), blocks)
    hidden_ND = model.hidden(inputs.flatten(), positions.flatten(), dense_attention(sees))
    hidden = hidden_ND.view(batch, inputs.shape[1], -1)[:, length:].flatten(0, 1)
    previous = tokens_BT.gather(1, places_BKG.flatten(1)).flatten()
    logits = model.logits(hidden, head="block_head") + model.markov(previous)
    return logits.view(batch, blocks, gamma, -1)


def _divergence(logits: Tensor, wanted: Tensor) -> Tensor:
    """Kullback-Leibler divergence of the draft from the target's log probabilities, in nats per token."""
    found = logits.log_softmax(-1).flatten(0, -2)
    return functional.kl_div(found, wanted.flatten(0, -2), log_target=True, reduction="batchmean")


def _batches(text: Sequence[int], seed: int) -> Iterator[Tensor]:
    """Endless random cuts of the text: int64 ``[B, T + 1]``."""
    tokens = torch.tensor(list(text))
    length = min(LENGTH, len(tokens) - 2)
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts_B = torch.randint(0, len(tokens) - length - 1, (SEQUENCES, 1), generator=generator)
        yield tokens[starts_B + torch.arange(length + 1)]


def _fit(
    weights: Weights,
    loss: Callable[[Tensor], Tensor],
    batches: Iterator[Tensor],
    steps: int,
    report: Callable[[int, float], None],
) -> None:
    """Adam with a warm-up and a cosine. Changes ``weights`` in place.

    On one thread: with two on a busy two-core machine the threads' barriers made it 3 to 15 times slower.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _optimise(weights, loss, batches, steps, report)
    finally:
        torch.set_num_threads(threads)


def _optimise(
    weights: Weights,
    loss: Callable[[Tensor], Tensor],
    batches: Iterator[Tensor],
    steps: int,
    report: Callable[[int, float], None],
) -> None:
    parameters = list(weights.values())
    for parameter in parameters:
        parameter.requires_grad_(True)
    adam = _Adam(parameters)
    for step in range(steps):
        value = loss(next(batches))
        value.backward()  # type: ignore[no-untyped-call]
        warm_up, cosine = (step + 1) / max(1, steps // 20), math.cos(math.pi / 2 * step / steps)
        adam.step(LEARNING_RATE * min(1.0, warm_up) * (0.05 + 0.95 * cosine))
        report(step + 1, value.item())
    for parameter in parameters:
        parameter.requires_grad_(False)


class _Adam:
    """Adam on clipped gradients. Our own, because importing ``torch.optim`` imports a compiler for seconds."""

    def __init__(self, parameters: Sequence[Tensor], decays: tuple[float, float] = (0.9, 0.98)) -> None:
        self._parameters = parameters
        self._moments = [(torch.zeros_like(each), torch.zeros_like(each)) for each in parameters]
        self._decays = decays
        self._steps = 0

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Move every parameter that has a gradient, and drop the gradients."""
        self._steps += 1
        norm = math.sqrt(sum(float(each.grad.square().sum()) for each in self._parameters if each.grad is not None))
        first, second = self._decays
        for parameter, (mean, square) in zip(self._parameters, self._moments, strict=True):
            if parameter.grad is None:
                continue
            gradient = parameter.grad * min(1.0, 1 / (norm + 1e-9))
            mean.lerp_(gradient, 1 - first)
            square.lerp_(gradient.square(), 1 - second)
            scale = (square / (1 - second**self._steps)).sqrt_().add_(1e-8)
            parameter.addcdiv_(mean, scale, value=-rate / (1 - first**self._steps))
            parameter.grad = None


def trained_weights(world: World, kind: Literal["block", "causal"], steps: int, report: Report) -> bytes:
    """Fit a target and then its draft on the text that ships; return both as ``torch.save`` writes them."""
    text = (files("specsync_core.demo") / "corpus.txt").read_bytes()
    target = train_target(world.config, world.seed, text, steps, report)
    draft = train_draft(world.config.draft(), target, world.config, kind, world.gamma, world.seed, text, steps, report)
    buffer = io.BytesIO()
    torch.save((target, draft), buffer)
    return buffer.getvalue()
