"""Keep a run's recordings where `specsync doctor` finds them after the demo has ended. No torch."""

from __future__ import annotations

import secrets
import shutil
import time
from pathlib import Path

from specsync_core.diagnostics.dump import SUFFIX as DUMP_SUFFIX
from specsync_core.diagnostics.recording import SUFFIX
from specsync_core.diagnostics.runs import prune

MOST_KEPT = 16


def keep_recordings(recordings: Path, directory: Path) -> Path:
    """Copy recordings and dumps into a folder of their own, named as an engine's runs are; the oldest runs are removed.

    Returns:
        The new folder.
    """
    prune(directory, MOST_KEPT - 1)
    kept = directory / f"run-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    kept.mkdir(parents=True)
    for path in recordings.iterdir():
        if path.name.endswith((SUFFIX, DUMP_SUFFIX)):
            shutil.copy2(path, kept)
    return kept
