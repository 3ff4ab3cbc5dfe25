"""The demo's engine under live control. Group rank 1 commits a wrong bonus token in every step, unless it is healed.

python examples/live_control.py /tmp/specsync.sock 2000

In another terminal: specsync ctl --socket /tmp/specsync.sock status
"""

import sys

from specsync_core.demo.config import Job, World
from specsync_core.demo.options import read_prompts
from specsync_core.demo.ranks import recordings_folder, run_world

path, steps = sys.argv[1], int(sys.argv[2])
fault = "dspark-accept-greedy:rank=1:from=0:tensor=bonus:add=1"
job = Job("live", "dspark", "all", steps, fault=fault, control=path, recorded=False)
world = World(ranks=2, device="cpu", seed=0, prompts=read_prompts(None), jobs=(job,))

if __name__ == "__main__":
    with recordings_folder() as folder:
        (end,) = run_world(world, folder, hang_after_s=60)
    if end.ranks is None:
        sys.exit(f"the ranks stopped: {end.stop}")
    ours, theirs = (end.ranks[rank].tokens for rank in (0, 1))
    same = sum(tokens == theirs[request] for request, tokens in ours.items())
    print(f"{same} of {len(ours)} requests have the same tokens on both ranks.")
