"""The payload contract: do these tensors fit their site's declaration?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specsync_core.registry import Site, TensorSpec

Signature = tuple[tuple[torch.Size, torch.dtype, torch.device], ...]


def signature_of(tensors: Sequence[Tensor]) -> Signature:
    """Shapes, dtypes and devices: what one call must have in common with a checked one."""
    return tuple([(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors])


def describe(tensors: Sequence[Any]) -> str:
    """Write shapes and dtypes for people, and for comparison between ranks: ``int64[8], bool[8, 4]``."""
    return ", ".join(
        f"{dtype_name(tensor)}{list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
        for tensor in tensors
    )


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def declared(site: Site) -> str:
    """Write a site's declaration for people: ``correct_len int32|int64[B], bonus int64|int32[B]``."""
    return ", ".join(
        f"{spec.name} {'|'.join(spec.dtypes)}[{', '.join(spec.shape)}]{' (optional)' if spec.optional else ''}"
        for spec in site.tensors
    )


def find_problem(site: Site, tensors: Sequence[Any]) -> str | None:
    """Return what keeps ``tensors`` from being a payload of ``site``, or None."""
    required, most = sum(not spec.optional for spec in site.tensors), len(site.tensors)
    if not required <= len(tensors) <= most:
        return f"it takes {required if required == most else f'{required} to {most}'} tensors, not {len(tensors)}"
    sizes: dict[str, tuple[int, str]] = {}
    for spec, tensor in zip(site.tensors, tensors):  # noqa: B905 - optional tensors may be left out
        problem = _tensor_problem(spec, tensor) or _size_problem(spec, tensor, sizes)
        if problem is not None:
            return problem
    devices = {str(tensor.device) for tensor in tensors}
    return f"its tensors are on several devices: {', '.join(sorted(devices))}" if len(devices) > 1 else None


def _tensor_problem(spec: TensorSpec, tensor: Any) -> str | None:
    if not isinstance(tensor, Tensor):
        return f"{spec.name} is a {type(tensor).__name__}, not a tensor"
    if dtype_name(tensor) not in spec.dtypes:
        return f"{spec.name} is {dtype_name(tensor)}, not {' or '.join(spec.dtypes)}"
    if tensor.dim() != len(spec.shape):
        return f"{spec.name} has shape {list(tensor.shape)}, not [{', '.join(spec.shape)}]"
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return f"{spec.name} is {tensor.layout} on {tensor.device}; only dense tensors with data can be broadcast"
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return f"{spec.name} is an expanded view whose elements share memory; pass {spec.name}.contiguous()"
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return f"{spec.name} was made in inference mode; call sync in inference mode too"
    if tensor.requires_grad:
        return f"{spec.name} requires grad; decisions are overwritten in place, so pass {spec.name}.detach()"
    return None


def _size_problem(spec: TensorSpec, tensor: Tensor, sizes: dict[str, tuple[int, str]]) -> str | None:
    for letter, size in zip(spec.shape, tensor.shape, strict=True):
        known, name = sizes.setdefault(letter, (size, spec.name))
        if known != size:
            return f"{letter} is {known} in {name} and {size} in {spec.name}"
    return None


@dataclass
class Packet:
    """One checked signature of one site, with what transports keep for it between calls."""

    name: str
    """The site's slug."""
    label: str
    """`describe` of the tensors."""
    nbytes: int
    """Bytes of the tensors together."""
    scratch: dict[str, Any] = field(default_factory=dict)
    """Buffers by transport, made when the signature is first seen so that a capture finds them."""
