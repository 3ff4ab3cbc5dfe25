"""The engine's loop on one rank: speculative output equals plain decoding, and the scheduler's bookkeeping."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from specsync_core.algorithm import Batch, Draft, DraftNetwork, Speculator, Verdict
from specsync_core.demo.config import ModelConfig
from specsync_core.demo.engine import Engine, Outcome
from specsync_core.demo.model import Alone, Decoder, init_draft, init_target
from specsync_core.demo.plain import PlainSpeculator
from specsync_core.demo.scheduler import Request, Scheduler

CONFIG = ModelConfig(vocab_size=32, hidden=32, heads=4, layers=2, mlp=32)
GAMMA = 3


class Chain:
    """A chain drafted from any draft network and accepted greedily; no sites."""

    width = GAMMA + 1

    def __init__(self, network: DraftNetwork, kind: str, verify_lens: Sequence[int] | None = None) -> None:
        self.network, self.kind, self.verify_lens = network, kind, verify_lens

    def draft(self, batch: Batch) -> Draft:
        tokens = [batch.anchor_B]
        base = self.network.block_logits(batch, GAMMA) if self.kind == "block" else None
        for step in range(GAMMA):
            if base is not None:
                logits = base[:, step] + self.network.markov_logits(tokens[-1])
            else:
                logits = self.network.path_logits(batch, torch.stack(tokens, 1)[:, None])[:, 0]
            tokens.append(logits.argmax(-1))
        chain = torch.stack(tokens, 1)
        lens = None
        if self.verify_lens is not None:
            lens = torch.tensor([self.verify_lens[i % len(self.verify_lens)] for i in range(len(chain))]).int()
        return Draft(chain, torch.arange(-1, GAMMA).expand_as(chain), lens)

    def accept(self, batch: Batch, draft: Draft, logits: Tensor) -> Verdict:
        wanted = logits.nan_to_num().argmax(-1)
        run = (draft.tokens_BW[:, 1:] == wanted[:, :-1]).long().cumprod(1).sum(1)
        if draft.verify_lens_B is not None:
            run = torch.minimum(run, draft.verify_lens_B.long() - 1)
        column, end = torch.arange(self.width), run[:, None]
        tokens = torch.cat((draft.tokens_BW[:, 1:], draft.tokens_BW[:, :1]), 1)
        tokens = torch.where(column == end, wanted.gather(1, end), tokens).masked_fill(column > end, -1)
        path = column.expand_as(tokens).masked_fill(column > end, -1)
        return Verdict(run + 1, tokens, path)

    def first_token(self, batch: Batch, logits: Tensor) -> Tensor:
        return logits.argmax(-1)


def run(kind: str | None, verify_lens: Sequence[int] | None = None, steps: int | None = None) -> Outcome:
    weights = init_target(CONFIG, seed=5)
    target = Decoder(CONFIG, weights, Alone())
    draft = Decoder(CONFIG.draft(), init_draft(CONFIG.draft(), weights), Alone(), "draft") if kind else None

    def bind(network: DraftNetwork | None) -> Speculator:
        if kind is None or network is None:
            return PlainSpeculator()
        return Chain(network, kind, verify_lens)

    requests = [Request(n, tuple(range(n, n + 3 + n % 4)), max_new_tokens=10 + n) for n in range(7)]
    return Engine(target, draft, bind, Scheduler(requests, 3), slots=3, max_len=32, tier=4).run(steps)


@pytest.fixture(scope="module")
def plain() -> Outcome:
    return run(None)


@pytest.mark.parametrize("kind", ["block", "causal"])
@pytest.mark.parametrize("verify_lens", [None, (1, 4, 2)])
def test_speculative_output_equals_plain_decoding(kind: str, verify_lens: Sequence[int] | None, plain: Outcome) -> None:
    outcome = run(kind, verify_lens)
    assert outcome.tokens == plain.tokens
    assert outcome.tokens_per_step > 1.2, "the draft is accepted sometimes, or this proves little"
    assert outcome.steps < plain.steps


def test_plain_decoding_ends_every_request_at_its_limit(plain: Outcome) -> None:
    assert {request: len(tokens) for request, tokens in plain.tokens.items()} == {n: 10 + n for n in range(7)}
    assert plain.tokens_per_step == 1
    assert len({tuple(tokens) for tokens in plain.tokens.values()}) > 1


def test_a_run_can_be_cut_after_some_steps(plain: Outcome) -> None:
    outcome = run(None, steps=4)
    assert outcome.steps == 4
    assert outcome.tokens == {request: plain.tokens[request][:5] for request in range(3)}


class TestScheduler:
    def test_requests_come_when_slots_are_free_and_leave_when_they_are_done(self) -> None:
        scheduler = Scheduler([Request(n, (1,), max_new_tokens=1 + n) for n in range(3)], slots=2)
        first = scheduler.admit()
        assert [(each.request.request_id, each.slot) for each in first] == [(0, 0), (1, 1)]
        assert scheduler.admit() == []
        for each in first:
            each.output.append(7)
        assert [each.request.request_id for each in scheduler.retire()] == [0]
        assert [(each.request.request_id, each.slot) for each in scheduler.admit()] == [(2, 0)]
        assert not scheduler.idle

    def test_it_is_idle_when_the_queue_is_dry_and_all_are_done(self) -> None:
        scheduler = Scheduler([Request(0, (1,), max_new_tokens=2)], slots=2)
        (only,) = scheduler.admit()
        only.output += [3, 4, 5]
        assert only.tokens == [3, 4], "what the last step committed beyond the limit is not output"
        assert only.prefix_len == 3
        scheduler.retire()
        assert scheduler.admit() == []
        assert scheduler.idle


def test_sampling_without_speculation_follows_the_generator() -> None:
    batch = Batch((0, 1), torch.zeros(2).long(), torch.zeros(2).long(), torch.tensor([0.0, 5.0]))
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0]])
    drawn = [PlainSpeculator(torch.Generator().manual_seed(seed)).first_token(batch, logits) for seed in range(20)]
    assert {int(tokens[0]) for tokens in drawn} == {1}
    assert len({int(tokens[1]) for tokens in drawn}) > 1
