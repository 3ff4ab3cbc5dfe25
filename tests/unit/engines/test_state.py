"""What the adapters compare of an engine's derived state."""

from types import SimpleNamespace

import torch

from specsync_core.checks import digest_of
from specsync_core.engines import sglang, vllm_adapter


def test_sglangs_batch():
    requests = [SimpleNamespace(rid="a"), SimpleNamespace(rid="b")]
    batch = SimpleNamespace(reqs=requests, seq_lens=torch.tensor([3, 4]), seq_lens_cpu=None)
    found = sglang.state_of(batch)
    assert found["state-request-ids"] == ["a", "b"]
    assert found["state-seq-lens"] is batch.seq_lens
    batch.seq_lens_cpu = torch.tensor([3, 5])
    assert digest_of(sglang.state_of(batch)["state-seq-lens"]) == digest_of([3, 5])


def test_vllms_batches():
    batch = SimpleNamespace(num_reqs=2, req_ids=["a", "b"], num_tokens_no_spec=[7, 8, 0, 0])
    found = vllm_adapter.state_of(SimpleNamespace(input_batch=batch))
    assert found == {"state-request-ids": ["a", "b"], "state-seq-lens": [7, 8]}
    runner = SimpleNamespace(req_states=SimpleNamespace(req_id_to_index={"b": 1, "a": 0}))
    assert vllm_adapter.state_of(runner) == {"state-request-ids": ["a", "b"]}
