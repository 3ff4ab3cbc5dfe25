"""Counts of one site on a device: accumulators that the stream itself updates, also at each replay of a graph.

Nothing here reads a value on the host before somebody asks for the counts. One int64 tensor holds everything, so
that asking is one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specsync_core.payload import Packet
from specsync_core.registry import Site

CALLS, BYTES, COMPARED, MISMATCHES, MISMATCHED_CALLS = range(5)
FIRST = 5
"""Where the record of the first difference begins; its `CALL` is 0 until there is one."""
CALL, STEP, SIGNATURE, ELEMENT, OWN, RANK0 = range(6)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """View a tensor's elements as integers (complex: as pairs), so that equal NaNs are equal."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.contiguous().view(_BITS[tensor.element_size()])


def uses_cuda() -> bool:
    """Whether this process has begun to use CUDA; asking does not make it begin."""
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


class StepClock:
    """The engine's step, where a captured graph can read it: one int64 per device."""

    def __init__(self) -> None:
        self._steps: dict[torch.device, Tensor] = {}
        self._step = 0

    def on(self, device: torch.device) -> Tensor:
        if device not in self._steps:
            self._steps[device] = torch.full((1,), self._step, dtype=torch.int64, device=device)
        return self._steps[device]

    def set(self, step: int) -> None:
        """Costs one small launch per device, and nothing where no site counts on a device."""
        self._step = step
        for steps in self._steps.values():
            steps.fill_(step)


class DeviceCounts:
    """Counts of one site on one device.

    Graph: every method but `read` is capturable once `prepare` has seen the signature.
    """

    def __init__(self, device: torch.device, clock: StepClock) -> None:
        self._words = torch.zeros(FIRST + 6, dtype=torch.int64, device=device)
        self._steps = clock.on(device)
        self._layouts: list[list[tuple[torch.Size, torch.dtype]]] = []
        """By signature, the shapes and dtypes of its tensors."""

    def prepare(self, packet: Packet, tensors: Sequence[Tensor], compares: bool) -> None:
        """Make this signature's constants, before any capture."""
        elements = sum(tensor.numel() for tensor in tensors)
        increments = [1, packet.nbytes, elements if compares else 0]
        packet.scratch["counter"] = self._words.new_tensor(increments)
        packet.scratch["signature"] = self._words.new_tensor([len(self._layouts)])
        self._layouts.append([(tensor.shape, tensor.dtype) for tensor in tensors])

    def count(self, packet: Packet, own: Sequence[Tensor], rank0: Sequence[Tensor] | None) -> None:
        """Count one call; ``rank0`` is None when nothing is compared."""
        words = self._words
        words[: COMPARED + 1].add_(packet.scratch["counter"])
        if rank0 is None or not sum(tensor.numel() for tensor in own):
            return
        mine, theirs = _flat(own), _flat(rank0)
        different = mine != theirs
        mismatches = different.sum().view(1)
        is_different = (mismatches > 0).long()
        words[MISMATCHES:FIRST].add_(torch.cat((mismatches, is_different)))
        at = different.view(torch.uint8).argmax().view(1)
        values = mine.index_select(0, at), theirs.index_select(0, at)
        now = torch.cat((words[:1], self._steps, packet.scratch["signature"], at, *values))
        is_first = is_different.bool() & (words[FIRST : FIRST + 1] == 0)
        words[FIRST:].copy_(torch.where(is_first, now, words[FIRST:]))

    def gap_note(self, request_of: Sequence[int]) -> GapNote:
        """Return what keeps the logit gap, for calls of the signature whose elements belong to these requests."""
        return GapNote(self._words, CALLS, FIRST + CALL, FIRST + ELEMENT, 0, request_of)

    def read(self) -> tuple[list[int], tuple[int, int, int, tuple[int, ...], Any, Any] | None]:
        """Return the five totals and the first difference (as `Counted.first`). Waits for the current stream."""
        words = self._words.tolist()
        first = words[FIRST:]
        if not first[CALL]:
            return words[:FIRST], None
        position, index, dtype = locate(self._layouts[first[SIGNATURE]], first[ELEMENT])
        half = {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)
        values = (value_of(first[OWN], half), value_of(first[RANK0], half))
        return words[:FIRST], (first[STEP], first[CALL], position, index, *values)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """The bits of all elements behind one another, as int64; a complex element is its pair of halves."""
    parts = [bits(tensor).flatten().long() for tensor in tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def locate(layout: Sequence[tuple[torch.Size, torch.dtype]], element: int) -> tuple[int, tuple[int, ...], torch.dtype]:
    """Return position, index and dtype of a flat element; the index of a complex one ends with 0 or 1, its half."""
    for position, (shape, dtype) in enumerate(layout):  # noqa: B007 - the loop ends at the element's tensor
        sizes = (*shape, 2) if dtype.is_complex else tuple(shape)
        count = torch.Size(sizes).numel()
        if element < count:
            break
        element -= count
    index: list[int] = []
    for size in reversed(sizes):
        element, place = divmod(element, size)
        index.insert(0, place)
    return position, tuple(index), dtype


def value_of(word: int, dtype: torch.dtype) -> Any:
    """Turn the bits of an element back into its value."""
    data = bytearray((word & (1 << 8 * dtype.itemsize) - 1).to_bytes(dtype.itemsize, "little"))
    value = torch.frombuffer(data, dtype=dtype)[0].item()
    return value if isinstance(value, (int, float, bool)) else str(value)


class GapNote:
    """The logit gap of the request that differed first: how close its decision was, kept on the device.

    Args:
        words: the counts that the gap belongs to.
        calls, first_call, element: where in ``words`` the number of calls, the first difference's call, and the
            first difference's element are.
        base: what is added to the element there.
        request_of: int64; the request that each element belongs to.
    """

    def __init__(
        self, words: Tensor, calls: int, first_call: int, element: int, base: int, request_of: Sequence[int]
    ) -> None:
        self._words = words
        self._calls, self._first_call, self._element, self._base = calls, first_call, element, base
        self._request_of = words.new_tensor(list(request_of) or [0])
        self._requests = max(request_of, default=0) + 1
        self._gap = torch.full((1,), float("nan"), dtype=torch.float32, device=words.device)

    def note(self, logits: Tensor) -> None:
        """Keep the gap when this very call holds the first difference. Capturable; reads nothing on the host."""
        words = self._words
        element = (words[self._element : self._element + 1] - self._base).clamp(0, len(self._request_of) - 1)
        request = self._request_of.index_select(0, element)
        gap = smallest_gap(logits, self._requests, request)
        first_call = words[self._first_call : self._first_call + 1]
        is_first = (first_call > 0) & (first_call == words[self._calls : self._calls + 1])
        self._gap.copy_(torch.where(is_first, gap, self._gap))

    def read(self) -> float | None:
        gap = float(self._gap.item())
        return None if gap != gap else gap


def smallest_gap(logits: Tensor, requests: int, request: Tensor) -> Tensor:
    """The smallest distance between best and second-best logit in the rows of one request: float32 ``[1]``.

    Args:
        logits: float ``[B, V]``, ``[B, S, V]`` or ``[B * S, V]``; a row with NaN counts for nothing.
        requests: B.
        request: int64 ``[1]`` on the same device.
    """
    rows_BSV = logits.reshape(requests, -1, logits.shape[-1]).index_select(0, request)
    best_BS2 = rows_BSV.float().topk(2, dim=-1).values
    gaps_BS = (best_BS2[..., 0] - best_BS2[..., 1]).nan_to_num(nan=float("inf"))
    return gaps_BS.amin().view(1)


def requests_of(site: Site, layout: Sequence[tuple[torch.Size, torch.dtype]]) -> list[int]:
    """The request of each element of a payload: the index along the dimension that is, or is a multiple of, B."""
    declared = zip(site.tensors, layout, strict=False)  # optional tensors may be left out
    sizes = [shape[spec.shape.index("B")] for spec, (shape, _) in declared if "B" in spec.shape]
    batch = sizes[0] if sizes else max((shape[0] for shape, _ in layout if shape), default=1)
    found: list[int] = []
    for shape, dtype in layout:
        count = shape.numel() * (2 if dtype.is_complex else 1)
        found += [element * batch // count for element in range(count)]
    return found
