"""Sampled output follows the target's distribution, although every rank draws from a generator of its own.

Two ranks decode the same prompt thousands of times on a vocabulary of 8; the joint distribution of the first three
tokens is compared with the exact one, from plain forward passes of the target.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from specsync_core.demo.config import Job, ModelConfig, World
from specsync_core.demo.model import Alone, Decoder, dense_attention, init_target
from specsync_core.demo.worker import Rank, make_groups
from specsync_core.testing import run_ranks

CONFIG = ModelConfig(vocab_size=8, hidden=32, heads=4, layers=2, mlp=32)
WORLD = World(
    2, "cpu", 4, (bytes([1, 6, 3]),), (),
    requests=6000, new_tokens=(3,), gamma=2, slots=500, config=CONFIG,
)  # fmt: skip
TEMPERATURE = 2.0
ALPHA = 1e-4

Counts = Counter[tuple[int, ...]]

JOBS = {
    name: Job(name, algorithm, "all", 10_000, TEMPERATURE, folded=folded, recorded=False)
    for name, algorithm, folded in [
        ("plain", None, False),
        ("dspark", "dspark", False),
        ("dspark folded", "dspark", True),
        ("dflash", "dflash", False),
        ("eagle", "eagle", False),
    ]
}
JOBS["plain, other temperature"] = replace(JOBS["plain"], name="plain, other temperature", temperature=2.4)


def do(rank: int, world_size: int) -> dict[str, tuple[Counts, float]]:
    member = Rank(WORLD, rank, make_groups(WORLD, rank), Path("no-recordings"))
    found = {}
    for name, job in JOBS.items():
        result = member.do(job, lambda step: None)
        found[name] = (Counter(tuple(tokens) for tokens in result.tokens.values()), result.tokens_per_step)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, tuple[Counts, float]]]:
    return run_ranks(do, 2, timeout_s=110)


@pytest.fixture(scope="module")
def exact() -> dict[tuple[int, ...], float]:
    """Probability of each triple of tokens behind the prompt."""
    model = Decoder(CONFIG, init_target(CONFIG, WORLD.seed), Alone())
    length = len(WORLD.prompts[0]) + 2
    continuations = list(product(range(CONFIG.vocab_size), repeat=2))
    tokens = torch.tensor([[*WORLD.prompts[0], *pair] for pair in continuations])
    sees = torch.ones(length, length, dtype=torch.bool).tril().expand(len(tokens), length, length)
    hidden = model.hidden(tokens.flatten(), torch.arange(length).repeat(len(tokens)), dense_attention(sees))
    logits = model.logits(hidden).view(len(tokens), length, -1).double()
    first, second, third = (logits[:, place] / TEMPERATURE for place in range(length - 3, length))
    return {
        (one, two, three): float(
            first[row].softmax(-1)[one] * second[row].softmax(-1)[two] * third[row].softmax(-1)[three]
        )
        for row, (one, two) in enumerate(continuations)
        for three in range(CONFIG.vocab_size)
    }


def p_value(counts: Counts, exact: dict[tuple[int, ...], float]) -> float:
    """Pearson's test; cells that expect fewer than five draws are taken together."""
    total = sum(counts.values())
    cells = [(counts[key], total * probability) for key, probability in exact.items()]
    rare = [cell for cell in cells if cell[1] < 5]
    cells = [cell for cell in cells if cell[1] >= 5] + [(sum(n for n, _ in rare), sum(e for _, e in rare))]
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells if expected)
    half_freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


@pytest.mark.parametrize("name", ["plain", "dspark", "dspark folded", "dflash", "eagle"])
def test_output_follows_the_targets_distribution(
    name: str, ranks: list[dict[str, tuple[Counts, float]]], exact: dict[tuple[int, ...], float]
) -> None:
    counts, tokens_per_step = ranks[0][name]
    assert sum(counts.values()) == WORLD.requests
    assert ranks[1][name][0] == counts, "the ranks draw differently, and were healed"
    assert p_value(counts, exact) > ALPHA
    if name != "plain":
        assert 1.2 < tokens_per_step < 2.8, "drafts are accepted and rejected, or this proves little"


def test_the_test_sees_a_wrong_distribution(
    ranks: list[dict[str, tuple[Counts, float]]], exact: dict[tuple[int, ...], float]
) -> None:
    assert sum(exact.values()) == pytest.approx(1)
    counts, _ = ranks[0]["plain, other temperature"]
    assert p_value(counts, exact) < 1e-9
