"""The demo's decoder: shards, the cache, and forwards over trees agree with one plain causal forward."""

from __future__ import annotations

import pytest
import torch

from specsync_core.demo.cache import KVCache, Rows, causal, forward, pad_to_tier, side_by_side, tree
from specsync_core.demo.config import ModelConfig, check_ranks
from specsync_core.demo.model import Alone, Decoder, dense_attention, init_draft, init_target, shard

TINY = ModelConfig(vocab_size=16, hidden=32, heads=4, layers=2, mlp=32)
WEIGHTS = init_target(TINY, seed=3)


def decoder() -> Decoder:
    return Decoder(TINY, WEIGHTS, Alone())


def causal_logits(tokens: list[int]) -> torch.Tensor:
    """Logits behind every token of one sequence, without a cache: the reference of this file."""
    length = len(tokens)
    sees = torch.ones(1, length, length, dtype=torch.bool).tril()
    model = decoder()
    return model.logits(model.hidden(torch.tensor(tokens), torch.arange(length), dense_attention(sees)))


def rows(slots: list[int], lens: list[int]) -> Rows:
    return Rows(torch.tensor(slots), torch.tensor(lens), max(lens))


def prefill(model: Decoder, cache: KVCache, slot: int, tokens: list[int]) -> torch.Tensor:
    depth, sees = causal(1, len(tokens), torch.device("cpu"))
    return model.logits(forward(model, cache, rows([slot], [0]), torch.tensor([tokens]), depth, sees))


class TestShards:
    @pytest.mark.parametrize("world_size", [1, 2, 4])
    def test_partial_results_of_all_ranks_add_up_to_the_whole(self, world_size: int) -> None:
        """Attention, MLP, embedding and head of each rank, summed or concatenated by hand."""
        x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
        parts = [shard(WEIGHTS, rank, world_size) for rank in range(world_size)]
        up = torch.cat([part["0.up"] for part in parts])
        assert torch.equal(up, WEIGHTS["0.up"])
        whole_mlp = torch.relu(x @ WEIGHTS["0.up"].T) @ WEIGHTS["0.down"].T
        mlp = sum(torch.relu(x @ part["0.up"].T) @ part["0.down"].T for part in parts)
        torch.testing.assert_close(mlp, whole_mlp)
        qkv = torch.cat([part["0.qkv"] for part in parts], dim=1)
        assert torch.equal(qkv, WEIGHTS["0.qkv"])
        assert torch.equal(torch.cat([part["head"] for part in parts]), WEIGHTS["head"])
        assert all(torch.equal(part["norm"], WEIGHTS["norm"]) for part in parts)

    def test_a_seed_decides_the_weights(self) -> None:
        again, other = init_target(TINY, seed=3), init_target(TINY, seed=4)
        assert all(torch.equal(again[name], tensor) for name, tensor in WEIGHTS.items())
        assert not torch.equal(other["embed"], WEIGHTS["embed"])

    def test_the_draft_is_the_targets_first_layer(self) -> None:
        draft = init_draft(TINY.draft(), WEIGHTS)
        assert torch.equal(draft["0.qkv"], WEIGHTS["0.qkv"])
        assert "1.qkv" not in draft
        assert draft["mask"].abs().sum() == 0

    def test_an_untrained_byte_model_prefers_printable_bytes(self) -> None:
        head = init_target(ModelConfig(), seed=0)["head"]
        assert head[7].abs().sum() == 0
        assert head[ord("a")].abs().sum() > 0

    @pytest.mark.parametrize(("world_size", "what"), [(3, "8 attention heads"), (16, "8 attention heads")])
    def test_ranks_that_cannot_share(self, world_size: int, what: str) -> None:
        with pytest.raises(ValueError, match=f"{world_size} ranks cannot share {what}.*that can: 1, 2, 4, 8"):
            check_ranks(ModelConfig(), world_size)


class TestCache:
    def test_prefill_equals_a_forward_without_cache(self) -> None:
        model, tokens = decoder(), [1, 5, 2, 9]
        logits = prefill(model, KVCache(model, 2, 32), 1, tokens)
        torch.testing.assert_close(logits, causal_logits(tokens))

    def test_a_tree_is_verified_as_each_of_its_paths(self) -> None:
        """Nodes: anchor 3, children 4 and 5, and 6 below 5. Another request beside it has a chain."""
        model = decoder()
        cache = KVCache(model, 2, 64)
        prompts = [[1, 2, 7], [8, 8]]
        for slot, prompt in enumerate(prompts):
            prefill(model, cache, slot, prompt)
        parents = torch.tensor([[-1, 0, 0, 2], [-1, 0, 1, 2]])
        tokens = torch.tensor([[3, 4, 5, 6], [3, 4, 5, 6]])
        depth, sees = tree(parents)
        assert depth.tolist() == [[0, 1, 1, 2], [0, 1, 2, 3]]
        hidden = forward(model, cache, rows([0, 1], [3, 2]), tokens, depth, sees)
        logits = model.logits(hidden).view(2, 4, -1)
        torch.testing.assert_close(logits[0, 1], causal_logits([1, 2, 7, 3, 4])[-1])
        torch.testing.assert_close(logits[0, 3], causal_logits([1, 2, 7, 3, 5, 6])[-1])
        torch.testing.assert_close(logits[1, 3], causal_logits([8, 8, 3, 4, 5, 6])[-1])

    def test_the_kept_path_is_what_the_next_forward_sees(self) -> None:
        model = decoder()
        cache = KVCache(model, 1, 64)
        prefill(model, cache, 0, [1, 2, 7])
        depth, sees = tree(torch.tensor([[-1, 0, 0, 2]]))
        forward(model, cache, rows([0], [3]), torch.tensor([[3, 4, 5, 6]]), depth, sees)
        cache.keep_path(rows([0], [3]), torch.tensor([[0, 2, 3, -1]]))
        depth, sees = causal(1, 1, torch.device("cpu"))
        hidden = forward(model, cache, rows([0], [6]), torch.tensor([[11]]), depth, sees)
        torch.testing.assert_close(model.logits(hidden)[0], causal_logits([1, 2, 7, 3, 5, 6, 11])[-1])

    def test_a_part_of_the_nodes_can_be_computed_alone(self) -> None:
        model = decoder()
        cache = KVCache(model, 2, 64)
        for slot in range(2):
            prefill(model, cache, slot, [1, 2, 7])
        depth, sees = causal(2, 4, torch.device("cpu"))
        index = torch.tensor(pad_to_tier([2, 3], width=4, tier=4))
        hidden = forward(model, cache, rows([0, 1], [3, 3]), torch.tensor([[3, 4, 5, 6]] * 2), depth, sees, index)
        assert len(hidden) == 8
        expected = causal_logits([1, 2, 7, 3, 4, 5])
        torch.testing.assert_close(model.logits(hidden)[1], expected[4])
        torch.testing.assert_close(model.logits(hidden)[4], expected[5])

    def test_tokens_behind_the_end_of_the_cache_are_refused(self) -> None:
        model = decoder()
        depth, sees = causal(1, 3, torch.device("cpu"))
        with pytest.raises(IndexError, match=r"target: 3 tokens behind 6 committed ones do not fit .* 8 positions"):
            forward(model, KVCache(model, 1, 8), rows([0], [6]), torch.tensor([[1, 2, 3]]), depth, sees)


def test_padding_repeats_the_first_token_up_to_the_tier() -> None:
    assert pad_to_tier([1, 3], width=4, tier=1) == [0, 4, 5, 6]
    assert pad_to_tier([1, 4], width=4, tier=4) == [0, 4, 5, 6, 7, 0, 0, 0]


def test_sequences_side_by_side_do_not_see_each_other() -> None:
    sees = side_by_side(torch.ones(2, 2, dtype=torch.bool).tril(), 2)
    assert sees.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
