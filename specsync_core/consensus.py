"""Agreement on host values: one gather of small frames over a CPU group, then the same pure function everywhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from specsync_core.collectives import gather_bytes
from specsync_core.errors import PayloadError, TransportError

if TYPE_CHECKING:
    import torch.distributed as dist

Op = Literal["min", "max", "all", "any", "root"]

FRAME_BYTES = 512
"""Size of the first gather; a longer value travels in a second one of an agreed size."""
LENGTH_DIGITS = 8


def agree_over(
    cpu_group: dist.ProcessGroup, slug: str, call: int, op: Op, compute: Callable[[], Any]
) -> tuple[Any, Any]:
    """Return this rank's value and the group's.

    A rank whose ``compute`` raises takes part all the same, so that every rank raises.

    Args:
        slug: the site; with ``call`` and ``op`` it shows that all ranks agree on the same thing.
        op: ``min`` and ``max`` of numbers; ``all`` and ``any`` of flags, or of lists (the elements that all or
            any ranks hold, in rank order); ``root`` takes group rank 0's value.
        compute: gives this rank's number, flag, string, None, or list of those.

    Raises:
        PayloadError: on every rank, when one rank's value cannot be computed or does not fit ``op``.
        TransportError: the ranks' calls do not match, a peer gave up, or the collective failed.
    """
    proposal: dict[str, Any] = {"at": f"call {call} of {slug}, op {op}"}
    try:
        value = proposal["value"] = _plain(compute(), op)
    except Exception as error:  # delivered to every rank, which then raise together
        value, proposal["error"] = None, f"{type(error).__name__}: {error}"
    proposals = [json.loads(text) for text in _gather(cpu_group, json.dumps(proposal), slug)]
    places = [proposal["at"] for proposal in proposals]
    if len(set(places)) > 1:
        where = "; ".join(f"group rank {rank} at {place}" for rank, place in enumerate(places))
        raise TransportError(f"{slug}: the ranks' agreements do not match: {where}.")
    errors = [
        f"group rank {rank}: {proposal['error']}" for rank, proposal in enumerate(proposals) if "error" in proposal
    ]
    if errors:
        raise PayloadError(f"{slug}: no agreement, since a rank has no value: {'; '.join(errors)}")
    return value, _reduce(op, [proposal["value"] for proposal in proposals])


def _plain(value: Any, op: Op) -> Any:
    """Check a value against ``op`` and make it what JSON can hold."""
    if op not in get_args(Op):
        raise PayloadError(f"unknown op {op!r}; known: {', '.join(get_args(Op))}")
    if hasattr(value, "item") and not isinstance(value, (list, tuple)):
        value = value.item()  # a NumPy or torch scalar
    if isinstance(value, (list, tuple)):
        if op in ("min", "max"):
            raise PayloadError(f"op {op!r} takes a number, not a list")
        return [_plain(element, "root") for element in value]
    if op in ("min", "max") and (not isinstance(value, (int, float)) or value != value):
        raise PayloadError(f"op {op!r} takes a number that is not NaN, not {value!r}")
    if op in ("all", "any") and not isinstance(value, (bool, int)):
        raise PayloadError(f"op {op!r} takes a flag or a list, not {value!r}")
    if value is not None and not isinstance(value, (bool, int, float, str)):
        raise PayloadError(
            f"a {type(value).__name__} cannot be agreed on; pass a number, a flag, a string or a list of those"
        )
    return value


def _reduce(op: Op, values: Sequence[Any]) -> Any:
    if op == "root":
        return values[0]
    if op in ("min", "max"):
        return min(values) if op == "min" else max(values)
    if any(isinstance(value, list) for value in values):
        union = list(dict.fromkeys(element for value in values for element in value))
        return union if op == "any" else [element for element in union if all(element in value for value in values)]
    return all(values) if op == "all" else any(values)


def _gather(cpu_group: dist.ProcessGroup, text: str, slug: str) -> list[str]:
    data = text.encode()
    first = f"{len(data):{LENGTH_DIGITS}}".encode() + data[: FRAME_BYTES - LENGTH_DIGITS]
    frames = gather_bytes(cpu_group, first.ljust(FRAME_BYTES), f"agreement at {slug}")
    lengths = [int(frame[:LENGTH_DIGITS]) for frame in frames]
    heads = [frame[LENGTH_DIGITS : LENGTH_DIGITS + length] for frame, length in zip(frames, lengths, strict=True)]
    longest = max(lengths) - (FRAME_BYTES - LENGTH_DIGITS)
    if longest > 0:
        tails = gather_bytes(cpu_group, data[FRAME_BYTES - LENGTH_DIGITS :].ljust(longest), f"agreement at {slug}")
        heads = [(head + tail)[:length] for head, tail, length in zip(heads, tails, lengths, strict=True)]
    return [head.decode() for head in heads]
