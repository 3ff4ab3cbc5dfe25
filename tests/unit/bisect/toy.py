"""A toy command for `specsync bisect`, and what is around it: a script that obeys SPECSYNC_SITES without any rank.

Its ranks tell that they synchronised as soon as the trial began: on a busy machine one run may be slower at its start
than another one is as a whole, which then counts as one that failed before its first sync.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

SCRIPT = """
import json, os, signal, subprocess, sys, time
plan = json.loads(sys.argv[1])
tokens = os.environ["SPECSYNC_SITES"].split(",")
off = {token[1:] for token in tokens if token[0] == "-"} | {t.split(":")[0] for t in tokens if ":" in t}
struck = [c for c in plan["culprits"] if tokens == ["off"] or set(c) <= off]
first = sum(name.startswith("run-") for name in os.listdir(plan["log"])) == 0 if plan["log"] else False
if plan["log"]:
    open(os.path.join(plan["log"], f"run-{os.environ['SPECSYNC_TRIAL']}-{os.getpid()}"), "w").close()
def leave(mode=None):
    folder = os.environ["SPECSYNC_STATS_DIR"]
    os.makedirs(folder, exist_ok=True)
    for rank in (0, 1):
        stats = {s: {"calls": 9, "compared": 9 * rank, "mismatches": 0, "first": None} for s in plan["called"]
                 if tokens != ["off"] and (s not in off or f"{s}:audit" in tokens)}
        for s in {s for c in plan["culprits"] for s in c} & set(stats):
            if rank and plan["differs"]: stats[s].update(mismatches=1, first={"step": 3, "call": 4})
        modes = dict.fromkeys(plan["called"], "sync")
        for s in off: modes[s] = "audit" if f"{s}:audit" in tokens else "off"
        if tokens == ["off"]: modes = dict.fromkeys(plan["called"], "off")
        if mode: modes = dict.fromkeys(plan["called"], mode)
        with open(os.path.join(folder, f"rank-{rank}-1-0.json"), "w") as file:
            json.dump({"version": 1, "group_rank": rank, "world_size": 2, "modes": modes, "settled": True,
                       "first_call_s": 1.0 if stats else None, "stats": stats}, file)
print("hello", flush=True)
how = plan["how"]
if how == "never starts": (print("cannot begin", file=sys.stderr), sys.exit(7))
if how == "own policy": leave(mode="sync")
elif plan["called"]: leave()
if how == "sleeps":
    argument = ["-S", "-I", "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"]
    subprocess.Popen([sys.executable, *argument])
    subprocess.Popen([sys.executable, *argument], start_new_session=True)
    if plan["stubborn"]: signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not first or plan["stubborn"]: open(os.path.join(plan["log"], "asleep"), "w").close()
    if not first or plan["stubborn"]: time.sleep(600)
if how == "leaves" : subprocess.Popen([sys.executable, "-S", "-I", "-c", "import time; time.sleep(600)"])
if struck:
    if how == "hangs": time.sleep(600)
    if how == "prints": print("something else")
    else: sys.exit(1)
if how == "always fails": sys.exit(3)
"""


def toy(
    folder: Path,
    *culprits: Sequence[str],
    how: str = "exits",
    called: Sequence[str] = (),
    stubborn: bool = False,
    differs: bool = True,
    log: Path | None = None,
) -> list[str]:
    """Write the script, and return the command that runs it.

    Args:
        how: what a struck run does: ``exits`` with 1, ``hangs``, ``prints`` something else; or what every run does.
        called: the sites that ranks call; none leaves no counts.
        differs: whether ranks are counted to differ at the culprits' sites.
        log: a directory in which each run leaves a file.
    """
    script = folder / "toy.py"
    script.write_text(SCRIPT)
    plan = {
        "culprits": [list(each) for each in culprits],
        "how": how,
        "called": list(called),
        "stubborn": stubborn,
        "differs": differs,
        "log": str(log) if log else "",
    }
    return [sys.executable, "-S", "-I", str(script), json.dumps(plan)]


def processes_with(text: str) -> list[int]:
    """Living processes that have a text in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if text.encode() in (entry / "environ").read_bytes() and int(entry.name) != os.getpid():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def wait_for(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait until something is so; a machine that runs tests is often busy."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.05)
