import torch


def reconstruct_indices_from_tree_mask(
    tree_mask, seq_lens, positions, retrieve_index, next_token, next_sibling, batch_size, nodes
):
    """Fill positions and links in place. ``tree_mask[b, i, j]``: node j is an ancestor of node i, or i itself."""
    mask = tree_mask.view(batch_size, nodes, nodes).bool()
    ancestors = mask & torch.ones(nodes, nodes, dtype=torch.bool).tril(-1)
    depth = ancestors.sum(-1)
    positions.view(batch_size, nodes).copy_(seq_lens.view(-1, 1) + depth)
    retrieve_index.copy_(torch.arange(batch_size * nodes).view(batch_size, nodes))
    next_token.fill_(-1)
    next_sibling.fill_(-1)
    for request in range(batch_size):
        last_child = {}
        for node in range(1, nodes):
            earlier = ancestors[request, node].nonzero().flatten()
            if len(earlier) == 0:
                continue
            parent = int(earlier[-1])
            if parent in last_child:
                next_sibling[request, last_child[parent]] = node
            else:
                next_token[request, parent] = node
            last_child[parent] = node
