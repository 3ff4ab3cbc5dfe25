"""From "it hangs" to a named decision: recorder, doctor and faults. Importing it imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specsync_core.diagnostics.divergence import Divergence
from specsync_core.diagnostics.doctor import Diagnosis, diagnose
from specsync_core.diagnostics.fault_grammar import parse_faults
from specsync_core.diagnostics.faults import Fault, FaultInjector
from specsync_core.diagnostics.progress import Wait
from specsync_core.diagnostics.recorder import Recorder
from specsync_core.diagnostics.recording import Recording, RecordingError, read_recording, recording_path

if TYPE_CHECKING:
    from specsync_core.diagnostics.session import Session, open_session

__all__ = [
    "Diagnosis",
    "Divergence",
    "Fault",
    "FaultInjector",
    "Recorder",
    "Recording",
    "RecordingError",
    "Session",
    "Wait",
    "diagnose",
    "open_session",
    "parse_faults",
    "read_recording",
    "recording_path",
]


def __getattr__(name: str) -> Any:
    if name in ("Session", "open_session"):  # these need torch
        from specsync_core.diagnostics import session

        return getattr(session, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
