"""Stand-in for the one kernel that NGRAM needs on CPU: a tree's links from its mask, in plain torch."""

from sgl_kernel.speculative import reconstruct_indices_from_tree_mask

__all__ = ["reconstruct_indices_from_tree_mask"]
