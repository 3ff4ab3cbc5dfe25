"""EAGLE on ROCm: a plugin of its own, active on HIP only. No torch here.

Every verify there takes the greedy path, and the all-reduce before it is not bit-identical between ranks, so it is
the greedy path where ROCm deadlocks (SG #28815, #34238). This plugin adds that verify as a broadcast point; from
0.5.18 on SGLang broadcasts it by itself there, and the point only covers simulated acceptance.

It has no policy hook: on ROCm the default is what it is elsewhere, every site whose ``platforms`` name ``rocm``, and
narrowing it would leave out the very path that deadlocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from specsync_core import BroadcastPoint, EngineFacts, hookimpl
from specsync_eagle.sglang import verify_points


@hookimpl
def specsync_broadcast_points(engine: EngineFacts) -> Sequence[BroadcastPoint]:
    """The verify's broadcast point on HIP; none elsewhere, where the `eagle` plugin has it.

    Should a call come inside HIP graph capture, the engine's own communicator must carry it: the first broadcast
    of a process group inside such a capture aborts (SG #37656).
    """
    return verify_points(engine, capture="engine-communicator") if engine.platform == "rocm" else ()
