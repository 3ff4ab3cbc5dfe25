"""Agreed trees in a mask that spans the sequences; the kernel that does it on a GPU is in `tests/engines`."""

import pytest
import torch
from specsync_eagle.tree_mask import spread_tree_

from tests.unit.plugins.tree_masks import CASES, lengths, mask_of, trees


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(("requests", "nodes"), CASES)
def test_every_trees_places_are_overwritten_and_no_others(requests, nodes, dtype):
    length_B = lengths(requests, dtype)
    own, theirs = (trees(requests, nodes, seed) for seed in (0, 1))
    mask = mask_of(own, length_B)
    assert not torch.equal(mask, mask_of(theirs, length_B))
    spread_tree_(mask, theirs.view(-1), length_B, nodes)
    assert torch.equal(mask, mask_of(theirs, length_B))
