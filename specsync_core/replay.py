"""Run a function over static buffers: as a captured graph on a GPU, directly elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator


class Replay:
    """A function of no arguments that reads and writes static buffers only.

    On CUDA and HIP it is captured at construction, once, and every call replays it; on other devices a call just
    calls it. Construction runs the function several times on a GPU, collectives included, so every rank of the
    group must construct it at the same moment.
    """

    def __init__(
        self, function: Callable[[], None], device: torch.device, *, generator: Generator | None = None
    ) -> None:
        """Capture the function, or keep it.

        Args:
            function: reads and writes buffers that outlive this object; no host reads, no value-dependent branches.
            device: where the buffers are.
            generator: draws inside the function; the graph advances it at every replay.
        """
        self._run = function if device.type != "cuda" else _capture(function, generator)

    def __call__(self) -> None:
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
