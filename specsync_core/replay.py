"""Run a function over static buffers: as a captured graph on a GPU, directly elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Generator

if TYPE_CHECKING:
    from specsync_core.sync import SpecTpSync


class Replay:
    """A function of no arguments that reads and writes static buffers only.

    On CUDA and HIP it is captured at construction, once, and every call replays it; on other devices a call just
    calls it. Construction runs the function several times on a GPU, collectives included, so every rank of the
    group must construct it at the same moment.

    A graph keeps the calls of the plan that it was captured under. When live control has changed the plan since, it is
    `stale`, and a call is refused, on a CPU too: make a new one, before its static buffers are filled.
    """

    def __init__(
        self,
        function: Callable[[], None],
        device: torch.device,
        *,
        generator: Generator | None = None,
        sync: SpecTpSync | None = None,
    ) -> None:
        """Capture the function, or keep it.

        Args:
            function: reads and writes buffers that outlive this object; no host reads, no value-dependent branches.
            device: where the buffers are.
            generator: draws inside the function; the graph advances it at every replay.
            sync: whose points the function calls; None where it calls none.
        """
        with nullcontext() if sync is None else sync.capturing() as self._captured:
            self._run = function if device.type != "cuda" else _capture(function, generator)

    @property
    def stale(self) -> bool:
        """Whether the plan has changed since the capture: on all ranks at the same step, so all see it alike."""
        return self._captured is not None and not self._captured.is_current

    def __call__(self) -> None:
        """Replay. Raises PlanMismatchError when the graph is stale."""
        if self._captured is not None:
            self._captured.check()
        self._run()


def _capture(function: Callable[[], None], generator: Generator | None) -> Callable[[], None]:
    warm_up = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        # Communicators and library workspaces come into being here: inside capture they would abort.
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        graph.register_generator_state(generator)
    # Other threads of the process (NCCL's watchdog queries events) must not invalidate the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        function()
    return graph.replay
