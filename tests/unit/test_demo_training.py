"""Training fits the target to text and the draft to the target, for either kind of draft."""

from __future__ import annotations

import io
from typing import Literal

import pytest
import torch

from specsync_core.demo.config import ModelConfig, World
from specsync_core.demo.model import init_draft
from specsync_core.demo.training import train_draft, train_target, trained_weights

TINY = ModelConfig(hidden=32, heads=4, layers=2, mlp=32)
TEXT = b"the cat sat on the mat and the dog sat on the log; " * 10


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("SEQUENCES", 4), ("LENGTH", 32), ("BLOCKS", 4)):
        monkeypatch.setattr(f"specsync_core.demo.training.{name}", size)


@pytest.mark.parametrize("kind", ["block", "causal"])
def test_losses_fall(kind: Literal["block", "causal"]) -> None:
    losses: dict[str, list[float]] = {"target": [], "draft": []}

    def report(model: str, step: int, loss: float) -> None:
        losses[model].append(loss)

    target = train_target(TINY, 0, TEXT, 25, report)
    before = {name: tensor.clone() for name, tensor in target.items()}
    draft = train_draft(TINY.draft(), target, TINY, kind, 3, 0, TEXT, 25, report)
    for name in ("target", "draft"):
        assert len(losses[name]) == 25
        assert losses[name][-1] < 0.7 * losses[name][0]
    assert all(torch.equal(target[name], tensor) for name, tensor in before.items())
    assert not any(tensor.requires_grad for tensor in (*target.values(), *draft.values()))
    untrained = init_draft(TINY.draft(), target)
    trained = {name for name, tensor in draft.items() if not torch.equal(tensor, untrained[name])}
    assert {"0.qkv", "embed"} <= trained
    assert ({"mask", "markov_in", "block_head"} <= trained) is (kind == "block")


def test_trained_weights_travel_as_bytes_and_do_not_depend_on_the_run() -> None:
    world = World(2, "cpu", 7, (), (), config=TINY)
    data = trained_weights(world, "causal", 2, lambda model, step, loss: None)
    target, draft = torch.load(io.BytesIO(data), weights_only=True)
    again, _ = torch.load(io.BytesIO(trained_weights(world, "causal", 2, lambda *_: None)), weights_only=True)
    assert set(draft) > set(target) - {name for name in target if name.startswith("1.")}
    assert all(torch.equal(again[name], tensor) for name, tensor in target.items())
