"""From "it hangs" to a named decision: recorder, doctor and faults. Importing it imports no torch."""

from specsync_core.diagnostics.divergence import Divergence
from specsync_core.diagnostics.doctor import Diagnosis, diagnose
from specsync_core.diagnostics.fault_grammar import parse_faults
from specsync_core.diagnostics.faults import Fault, FaultInjector
from specsync_core.diagnostics.progress import Wait
from specsync_core.diagnostics.recorder import Recorder
from specsync_core.diagnostics.recording import Recording, RecordingError, read_recording, recording_path

__all__ = [
    "Diagnosis",
    "Divergence",
    "Fault",
    "FaultInjector",
    "Recorder",
    "Recording",
    "RecordingError",
    "Wait",
    "diagnose",
    "parse_faults",
    "read_recording",
    "recording_path",
]
