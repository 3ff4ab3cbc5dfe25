"""One run of the demo's engine under the environment's policy, without the story: what `specsync bisect` repeats."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import closing

from specsync_core.demo.config import Job
from specsync_core.demo.options import Setup
from specsync_core.demo.ranks import recordings_folder
from specsync_core.demo.runner import Ended, Runner, Working


def run_once(setup: Setup, sites: str, working: Working) -> Ended:
    """Run the engine once. Every process has ended and every file is gone when this returns or raises.

    Args:
        sites: the policy, in the grammar of ``SPECSYNC_SITES``.
    """
    options = setup.options
    job = Job(
        name="once",
        algorithm=setup.algorithm.name,
        sites=sites,
        steps=options.steps,
        temperature=options.temperature,
        fault=setup.fault_text,
        transport=setup.transport,
        folded=options.folded,
    )
    with recordings_folder() as folder, closing(Runner(setup, folder, working, keep_all=True).run([job])) as ends:
        return next(ends)


def digest(tokens: Mapping[int, list[int]]) -> str:
    """Return a hash of all requests' tokens: equal for equal text."""
    text = ";".join(f"{request}:{','.join(map(str, tokens[request]))}" for request in sorted(tokens))
    return hashlib.sha256(text.encode()).hexdigest()
