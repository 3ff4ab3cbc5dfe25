"""An engine's step with specsync. Run it on two ranks:

torchrun --standalone --nproc-per-node 2 examples/engine_step.py
"""

import torch
import torch.distributed as dist

from specsync_core import ParallelGroups, SpecTpSync, TorchGroup

dist.init_process_group("gloo")
rank = dist.get_rank()

# Once, at start-up: reads the policy, compares plans between ranks, chooses a transport.
sync = SpecTpSync(ParallelGroups(tp=TorchGroup()))
accept = sync.point("dspark-accept-greedy")  # bound once, for the hot loop

# Free memory differs between ranks; what is decided by it must not.
free_gib = sync.available_memory_gb("dspark-mem", "cpu", 0)

# Each rank accepts by itself, and rank 1 gets it wrong ...
correct_len = torch.tensor([3, 1 + rank])
bonus = torch.tensor([17, 42 + rank])
cap_trim_lens = torch.tensor([0, 0])

# ... so rank 0's decision becomes the group's, before anything is derived from it.
accept(correct_len, bonus, cap_trim_lens)  # one collective for the three, in place
seq_lens = torch.tensor([100, 200]) + correct_len + 1

print(f"rank {rank}: {seq_lens.tolist()}, healed {sync.stats()['dspark-accept-greedy'].mismatches}")
dist.destroy_process_group()
