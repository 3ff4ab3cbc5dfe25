"""The recorder: a tap that keeps one rank's recent decisions and waits in a memory-mapped ring.

The ring is a shared mapping of a file, so what was recorded survives SIGKILL and an abort inside a native
collective, and another process can read it while this rank's main thread is stuck. Reading is
`specsync_core.diagnostics.recording`; the doctor merges the recordings of a group. Importing this module
does not import torch.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any
from zlib import crc32

from specsync_core.diagnostics import recording as fmt
from specsync_core.diagnostics.facts import current_device, generators, library_versions
from specsync_core.diagnostics.progress import host_identity
from specsync_core.diagnostics.recording import Recording, RecordingError, StrPath, read_recording, recording_path
from specsync_core.registry import Site

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Recorder", "Recording", "RecordingError", "read_recording", "recording_path"]

_NO_DIMS = (0, 0, 0, 0)


class Recorder:
    """A tap that writes each call of each site, and the engine's own waits, into a ring in a file.

    Args:
        path: the file; an older one is replaced, parent directories are made. `recording_path` names it well.
        group_rank: this rank within its group.
        world_size: the group's size.
        ranks: global ranks of the group's members, by group rank.
        plan_digest: the plan's digest, so that recordings under different plans are told apart.
        sites: the registry's sites; a reader of the file then needs no registry.
        values: keep checksums and first values of tensors that are on a device too. That means a host
            synchronisation per tensor. Values of CPU tensors are always kept.
        prompts: keep values of drafts that the host copies out of prompts (n-grams, suffixes) too; without it a
            recording holds their checksums alone, and no text of a prompt.
        slots: size of the ring in records (one per tensor, before and after; two per wait), 216 bytes each.
        run_id: any text that is equal on the ranks of one run and different in the next.
        modes: the sites' modes by slug, so that a reader knows what a rank was meant to keep to itself.
        versions: of software and hardware, by name; None finds out.

    Raises:
        RecordingError: the file cannot be made, e.g. for want of space.

    Graph: while a CUDA graph is being captured shapes alone are recorded, and no host read happens.

    Put it behind the fault injector in ``taps``, so that it sees injected values.
    """

    def __init__(
        self,
        path: StrPath,
        *,
        group_rank: int,
        world_size: int,
        ranks: Sequence[int],
        plan_digest: str,
        sites: Iterable[Site],
        values: bool = False,
        prompts: bool = False,
        slots: int = 16384,
        run_id: str = "",
        modes: Mapping[str, str] | None = None,
        versions: Mapping[str, str | None] | None = None,
    ) -> None:
        self.path = Path(path)
        self.step = 0
        """The engine's step, as the last site call told it; written with the waits. May be set."""
        self.group_rank = group_rank
        self.cuda_device = current_device()
        """Of the thread that made it; None where CUDA was not in use."""
        self.busy: dict[int, str] = {}
        """What this rank is inside of, and has not left: waits by number, a site's call as 0. The last is innermost."""
        self.moved_s = time.monotonic()
        """When the newest record was written."""
        self._values = values
        self._prompts = prompts
        self._skips = False
        self._calls: dict[int, int] = {}
        self._dtypes: dict[Any, tuple[int, int]] = {}
        self._sequence = itertools.count(1)
        self._waits = itertools.count(1)
        self.about = {
            "group_rank": group_rank,
            "world_size": world_size,
            "ranks": list(ranks),
            "plan_digest": plan_digest,
            "run_id": run_id,
            "pid": os.getpid(),
            "host": host_identity(),
            "versions": library_versions() if versions is None else dict(versions),
            "started_s": time.time(),
            "sites": {str(s.number): [s.slug, s.kind, [spec.name for spec in s.tensors], s.cause] for s in sites},
            "modes": dict(modes or {}),
            "generators": generators(),
        }
        """The header: who writes, under what plan, with what software."""
        if slots < 1:
            raise RecordingError(f"{path}: a ring of {slots} records holds nothing; give slots of at least 1.")
        header = fmt.write_header(self.about, slots)
        self._slots = slots
        self._ring = len(header)
        try:
            self._map: mmap.mmap | None = _create(self.path, header, self._ring + slots * fmt.SLOT_BYTES)
        except OSError as error:
            raise RecordingError(f"{path}: the recording cannot be made: {error}. Choose another directory.") from error

    def before(self, site: Site, tensors: Sequence[Tensor], step: int) -> None:
        """Record this rank's own values, before the sync. Microseconds per CPU tensor; see ``values`` for others."""
        self._calls[site.number] = self._calls.get(site.number, 0) + 1
        self.busy[0] = site.slug
        self._record_call(fmt.BEFORE, site, tensors, step)

    def skipped(self, site: Site) -> None:
        """Be told that this rank leaves the sync of the present call out."""
        self._skips = True

    def after(self, site: Site, tensors: Sequence[Tensor], step: int) -> None:
        """Record the values that everything is derived from."""
        self._record_call(fmt.AFTER, site, tensors, step, fmt.SKIPPED if self._skips else 0)
        self._skips = False
        self.busy.pop(0, None)

    def failed(self, site: Site, error: BaseException) -> None:
        """Be told that an exception leaves the present call; its type is recorded, not its text."""
        self._skips = False
        data = type(error).__name__.encode()[: fmt.VALUE_BYTES]
        call = self._calls.get(site.number, 0)
        self._write(fmt.RAISED, fmt.FAILED, 0, 0, site.number, self.step, call, 0, 0, len(data), _NO_DIMS, 0, 0, data)
        self.busy.pop(0, None)

    def waiting(self, what: str, detail: str = "") -> Waiting:
        """Return a context manager that marks a wait of the engine's own, e.g. a collective.

        Args:
            what: the kind of wait, equal on all ranks that meet in it: ``tp all-reduce``.
            detail: which one: ``layer 1 mlp, batch 7``. Both together are cut at 127 bytes of UTF-8.
        """
        return Waiting(self, what, detail)

    def begin_wait(self, what: str, detail: str = "") -> int:
        """Mark the begin of a wait; returns the number that `end_wait` takes."""
        number = next(self._waits)
        self.busy[number] = what
        self._record_text(fmt.WAIT_BEGIN, number, f"{what}\0{detail}")
        return number

    def end_wait(self, number: int, error: str = "") -> None:
        """Mark the end of a wait; ``error`` names the exception's type when it failed."""
        self._record_text(fmt.WAIT_END, number, error, fmt.FAILED if error else 0)
        self.busy.pop(number, None)

    def close(self, outcome: str = "finished") -> None:
        """Write that this rank ended in an orderly way, and let go of the file. Later calls do nothing."""
        self.busy.clear()
        if self._map is None:
            return
        self._record_text(fmt.CLOSED, 0, outcome)
        self._map.close()
        self._map = None

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        self.close("finished" if kind is None else f"failed: {kind.__name__}")

    def read(self) -> Recording:
        """Return what the ring holds now; from any thread."""
        ring = self._map
        return read_recording(self.path) if ring is None else fmt.parse_recording(self.path, ring[:])

    def _record_call(self, kind: int, site: Site, tensors: Sequence[Tensor], step: int, more: int = 0) -> None:
        self.step = step
        site_number = site.number
        call = self._calls.get(site_number, 0)
        count = len(tensors)
        if count == 0:
            self._write(kind, more, 0, 0, site_number, step, call, 0, 0, 0, _NO_DIMS, 0, 0, b"")
        for index, tensor in enumerate(tensors):
            shape = tensor.shape
            numel = tensor.numel()
            code, itemsize = self._dtypes.get(tensor.dtype) or self._learn_dtype(tensor)
            data, flags = self._read_bytes(tensor, numel * itemsize)
            head = b"" if not self._prompts and copies_prompts(site) else data[: fmt.VALUE_BYTES]
            self._write(
                kind, flags | more, index, count, site_number, step, call, code, len(shape), len(head),
                (*shape, *_NO_DIMS)[:4], numel, crc32(data), head,
            )  # fmt: skip

    def _read_bytes(self, tensor: Tensor, size: int) -> tuple[bytes, int]:
        """Return the tensor's bytes and the flags that go with them; nothing where they may not be read."""
        try:
            if not tensor.is_cpu:
                if not self._values:
                    return b"", 0
                if tensor.is_cuda and _is_capturing():
                    return b"", fmt.CAPTURING
                tensor = tensor.detach().cpu()
            if not tensor.is_contiguous():
                tensor = tensor.contiguous()
            return ctypes.string_at(tensor.data_ptr(), size), fmt.HAS_VALUES
        except (RuntimeError, NotImplementedError):
            return b"", 0  # no memory of its own: sparse, meta or fake tensors

    def _learn_dtype(self, tensor: Tensor) -> tuple[int, int]:
        code = fmt.DTYPE_CODES.get(str(tensor.dtype).removeprefix("torch."), 0)
        self._dtypes[tensor.dtype] = known = (code, tensor.element_size())
        return known

    def _record_text(self, kind: int, call: int, text: str, flags: int = 0) -> None:
        data = text.encode()[: fmt.VALUE_BYTES]
        self._write(kind, flags, 0, 0, 0, self.step, call, 0, 0, len(data), _NO_DIMS, 0, 0, data)

    def _write(
        self, kind: int, flags: int, tensor_index: int, tensor_count: int, site_number: int, step: int, call: int,
        dtype: int, ndim: int, value_bytes: int, dims: tuple[int, ...], numel: int, crc: int, payload: bytes,
    ) -> None:  # fmt: skip
        ring = self._map
        if ring is None:
            return
        sequence = next(self._sequence)
        self.moved_s = now_s = time.monotonic()
        body = fmt.BODY.pack(
            sequence, kind, flags, tensor_index, tensor_count, site_number, step, call, time.time(), now_s,
            dtype, ndim, value_bytes, *dims, numel, crc, payload,
        )  # fmt: skip
        start = self._ring + (sequence - 1) % self._slots * fmt.SLOT_BYTES
        ring[start : start + fmt.SLOT_BYTES] = body + crc32(body).to_bytes(4, "little")


class Waiting:
    """The context manager of `Recorder.waiting`."""

    __slots__ = ("_detail", "_number", "_recorder", "_what")

    def __init__(self, recorder: Recorder, what: str, detail: str) -> None:
        self._recorder, self._what, self._detail = recorder, what, detail
        self._number = 0

    def __enter__(self) -> None:
        self._number = self._recorder.begin_wait(self._what, self._detail)

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        self._recorder.end_wait(self._number, kind.__name__ if kind else "")


def copies_prompts(site: Site) -> bool:
    """Whether the site's values are drafts that hosts look up in the requests' own text."""
    return site.phase == "draft" and site.cause == "host"


def _is_capturing() -> bool:
    import torch

    return torch.cuda.is_current_stream_capturing()


def _create(path: Path, header: bytes, size: int) -> mmap.mmap:
    """Make the file, reserve its space and map it. The magic goes in last: a reader sees the whole header or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # never truncate: someone may have it mapped
    with open(path, "x+b") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk shows here, not as SIGBUS in the engine
        else:
            file.write(bytes(size))
            file.flush()
        ring = mmap.mmap(file.fileno(), size)
    magic = len(fmt.MAGIC)
    ring[magic : len(header)] = header[magic:]
    ring[:magic] = header[:magic]
    return ring
