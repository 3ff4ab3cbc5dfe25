"""Agreement on host values: one gather of small frames over a CPU group, then the same pure function everywhere.

Agreements that are pending at the same moment travel in one gather. A rank that has no value, because what computes
it raised or because it does not fit, takes part all the same: every rank then raises, and the group stays usable.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from specsync_core.collectives import gather_bytes, store_of
from specsync_core.errors import PayloadError, TransportError

if TYPE_CHECKING:
    import torch.distributed as dist

Op = Literal["min", "max", "all", "any", "root"]
OPS = get_args(Op)
Proposal: TypeAlias = dict[str, Any]
"""What one rank brings: where it is (``at``), and its ``value`` or an ``error``."""

FRAME_BYTES = 512
"""Size of the first gather; a longer value travels in a second one of an agreed size."""
LENGTH_DIGITS = 8
MAX_BYTES = 10**LENGTH_DIGITS - 1
_EXACT: dict[type, Callable[[Any], Any]] = {int: int.__int__, float: float.__float__, str: str.__str__}
"""By type, what makes a subclass's value one of the type itself: a rank that is healed gets that, so all must."""


@dataclass(frozen=True)
class Ask:
    """One agreement, as one rank brings it."""

    slug: str
    call: int
    """The site's call number; with ``slug`` and ``op`` it shows that all ranks agree on the same thing."""
    op: Op
    compute: Callable[[], Any]
    """Gives this rank's number, flag, string, None, or list of those."""
    leads: bool = False
    """Only group rank 0 computes."""
    act: str = ""
    """What is done with the values, where it is no agreement."""

    @property
    def place(self) -> str:
        if self.act:
            return f"call {self.call} of {self.slug}, {self.act}"
        return f"call {self.call} of {self.slug}, {'led by group rank 0' if self.leads else f'op {self.op}'}"


def agree_over(
    cpu_group: dist.ProcessGroup, slug: str, call: int, op: Op, compute: Callable[[], Any]
) -> tuple[Any, Any]:
    """`agree_together` on a single value: return this rank's and the group's."""
    return agree_together(cpu_group, [Ask(slug, call, op, compute)])[0]


def agree_together(cpu_group: dist.ProcessGroup, asks: Sequence[Ask]) -> list[tuple[Any, Any]]:
    """Agree on several values in one collective; return for each this rank's value and the group's.

    ``min`` and ``max`` take numbers; ``all`` and ``any`` flags, or lists (the elements that all or any ranks
    hold, in rank order); ``root`` takes group rank 0's value. Where group rank 0 leads, the others have no value
    of their own, and get group rank 0's for it.

    Raises:
        PayloadError: on every rank, when one rank's value cannot be computed or does not fit its op.
        TransportError: the ranks' calls do not match, a peer gave up, or the collective failed.
    """
    own, proposals = _bring(cpu_group, asks)
    agreed = [_reduce(ask.op, [each[index].get("value") for each in proposals]) for index, ask in enumerate(asks)]
    return [
        (value if ask.leads else proposal["value"], value)
        for ask, proposal, value in zip(asks, own, agreed, strict=True)
    ]


def gather_values(
    cpu_group: dist.ProcessGroup, slug: str, call: int, act: str, compute: Callable[[], Any]
) -> list[Any]:
    """Return every rank's value, by group rank; raises as `agree_together`.

    Args:
        act: what is done with them; the ranks' acts must match.
    """
    _, proposals = _bring(cpu_group, [Ask(slug, call, "root", compute, act=act)])
    return [each[0]["value"] for each in proposals]


def _bring(cpu_group: dist.ProcessGroup, asks: Sequence[Ask]) -> tuple[list[Proposal], list[list[Proposal]]]:
    """Bring what every rank proposes to every rank: this rank's own, and all of them by group rank."""
    store = store_of(cpu_group)
    slugs = ", ".join(ask.slug for ask in asks)
    causes: list[Exception] = []
    try:
        own = [_propose(ask, store.rank, causes) for ask in asks]
    except BaseException as error:  # an interrupt: the peers must not wait for this rank
        store.fail(TransportError(f"{slugs}: {type(error).__name__} while it computed its value"))
        raise
    own_text = json.dumps(own)
    texts = _gather(cpu_group, own_text, slugs)
    proposals = [own if text == own_text else json.loads(text) for text in texts]  # equal as a rule
    places = ["; ".join(proposal["at"] for proposal in each) for each in proposals]
    if len(set(places)) > 1:
        where = "; ".join(f"group rank {rank} at {place}" for rank, place in enumerate(places))
        raise TransportError(f"{slugs}: the ranks' agreements do not match: {where}.")
    errors = [
        f"{ask.slug}: no agreement, since a rank has no value: group rank {rank}: {each[index]['error']}"
        for index, ask in enumerate(asks)
        for rank, each in enumerate(proposals)
        if "error" in each[index]
    ]
    if errors:
        raise PayloadError("\n".join(errors)) from (causes[0] if causes else None)
    return own, proposals


def _propose(ask: Ask, rank: int, causes: list[Exception]) -> Proposal:
    proposal: Proposal = {"at": ask.place}
    if ask.leads and rank:
        return proposal
    try:
        proposal["value"] = _plain(ask.compute(), ask.op)
        if not _is_short(proposal["value"]) and len(json.dumps(proposal["value"])) > MAX_BYTES // 2:
            raise PayloadError(f"a value of more than {MAX_BYTES // 2} bytes is too long to agree on")
    except Exception as error:  # delivered to every rank, which then raise together
        proposal.pop("value", None)
        proposal["error"] = f"{type(error).__name__}: {error}"
        causes.append(error)
    return proposal


def _is_short(value: Any) -> bool:
    """Whether a value needs no look at its length, or at whether it can be written at all."""
    return isinstance(value, (bool, float)) or (isinstance(value, int) and value.bit_length() <= 64)


def _plain(value: Any, op: Op) -> Any:
    """Check a value against ``op`` and make it what JSON can hold."""
    if op not in OPS:
        raise PayloadError(f"unknown op {op!r}; known: {', '.join(OPS)}")
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
    if value is None or type(value) in _EXACT or isinstance(value, bool):
        return value
    for kind, exact in _EXACT.items():
        if isinstance(value, kind):  # an enum's member, say
            return exact(value)
    raise PayloadError(
        f"a {type(value).__name__} cannot be agreed on; pass a number, a flag, a string or a list of those"
    )


def _reduce(op: Op, values: Sequence[Any]) -> Any:
    if op == "root":
        return values[0]
    if op in ("min", "max"):
        return min(values) if op == "min" else max(values)
    lists = [value for value in values if isinstance(value, list)]
    if len(lists) == len(values):
        held = [{json.dumps(element): element for element in value} for value in lists]  # elements may be lists
        union = {key: element for elements in held for key, element in elements.items()}
        return [element for key, element in union.items() if op == "any" or all(key in each for each in held)]
    if lists:
        raise PayloadError(f"op {op!r} takes a list on every rank or on none")
    return all(values) if op == "all" else any(values)


def _gather(cpu_group: dist.ProcessGroup, text: str, slugs: str) -> list[str]:
    data = text.encode()
    what = f"agreement at {slugs}"
    first = f"{len(data):{LENGTH_DIGITS}}".encode() + data[: FRAME_BYTES - LENGTH_DIGITS]
    own = first.ljust(FRAME_BYTES)
    frames = gather_bytes(cpu_group, own, what)
    if len(data) <= FRAME_BYTES - LENGTH_DIGITS and all(frame == own for frame in frames):
        return [text] * len(frames)
    lengths = [int(frame[:LENGTH_DIGITS]) for frame in frames]
    heads = [frame[LENGTH_DIGITS : LENGTH_DIGITS + length] for frame, length in zip(frames, lengths, strict=True)]
    longest = max(lengths) - (FRAME_BYTES - LENGTH_DIGITS)
    if longest > 0:
        tails = gather_bytes(cpu_group, data[FRAME_BYTES - LENGTH_DIGITS :].ljust(longest), what)
        heads = [(head + tail)[:length] for head, tail, length in zip(heads, tails, lengths, strict=True)]
    return [head.decode() for head in heads]
