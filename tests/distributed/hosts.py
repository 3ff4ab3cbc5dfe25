"""Two hosts on one machine: network namespaces, the link between them, and what can go wrong with it.

The link is a veth pair. Delay, jitter and loss come from ``tc netem`` where the kernel has it; else a relay in user
space stands in for it, between two TUN devices. Partitions are iptables rules, or a pulled cable.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import get_context

PREFIX = "specsync"
LINK = "wire0"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Weather:
    """What the link does to packets, in each direction."""

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    loss_percent: float = 0.0

    @property
    def is_fair(self) -> bool:
        return not (self.delay_ms or self.jitter_ms or self.loss_percent)


class UnavailableError(Exception):
    """This machine cannot do it; the message says why."""


def sh(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
    if check and done.returncode:
        raise UnavailableError(f"`{' '.join(words)}` failed: {done.stderr.strip() or done.returncode}")
    return done


@contextlib.contextmanager
def two_hosts(weather: Weather) -> Iterator[tuple[str, str]]:
    """Two namespaces with a link; removed whatever happens. Yields their names.

    Raises:
        UnavailableError: not Linux, not root, no iproute2, or the kernel does not allow it.
    """
    if sys.platform != "linux" or os.geteuid() != 0:
        raise UnavailableError("network namespaces need Linux and root")
    if shutil.which("ip") is None:
        raise UnavailableError("network namespaces need `ip` (Debian: iproute2)")
    remove_leftovers()
    names = tuple(f"{PREFIX}-{os.getpid()}-{end}" for end in "ab")
    with contextlib.ExitStack() as stack:
        for name in names:
            sh("ip", "netns", "add", name)
            stack.callback(sh, "ip", "netns", "del", name, check=False)
            sh("ip", "-n", name, "link", "set", "lo", "up")
        stack.enter_context(_link(names, weather))
        yield names


def remove_leftovers() -> None:
    """Remove namespaces of test runs that were killed."""
    for line in sh("ip", "netns", "list", check=False).stdout.splitlines():
        words = line.split()
        parts = words[0].split("-") if words else []
        if parts[:1] == [PREFIX] and len(parts) == 3 and not os.path.exists(f"/proc/{parts[1]}"):
            sh("ip", "netns", "del", words[0], check=False)


@contextlib.contextmanager
def _link(names: tuple[str, ...], weather: Weather) -> Iterator[None]:
    by_kernel = weather.is_fair or has_netem(names[0])
    relay = None
    if by_kernel:
        sh("ip", "link", "add", LINK, "netns", names[0], "type", "veth", "peer", "name", LINK, "netns", names[1])
    else:
        relay = Relay(names, weather)
        relay.start()
    try:
        for name, address in zip(names, ADDRESSES, strict=True):
            sh("ip", "-n", name, "addr", "add", f"{address}/24", "dev", LINK)
            sh("ip", "-n", name, "link", "set", LINK, "up")
            if by_kernel and not weather.is_fair:
                impair(name, weather)
        yield
    finally:
        if relay is not None:
            relay.stop()


def has_netem(name: str) -> bool:
    done = sh(
        "ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms", check=False
    )
    sh("ip", "netns", "exec", name, "tc", "qdisc", "del", "dev", "lo", "root", check=False)
    return done.returncode == 0


def impair(name: str, weather: Weather) -> None:
    netem = ["netem", "delay", f"{weather.delay_ms}ms", f"{weather.jitter_ms}ms", "loss", f"{weather.loss_percent}%"]
    sh("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", LINK, "root", *netem)


def enter(name: str) -> None:
    """Move this thread, and the threads and processes that it starts from now on, to a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {name}")


def cut(for_s: float | None = None) -> None:
    """Partition: drop everything that comes in or goes out at this end, for ever or for a while."""
    if shutil.which("iptables"):
        for chain in ("INPUT", "OUTPUT"):
            sh("iptables", "-w", "-A", chain, "-i" if chain == "INPUT" else "-o", LINK, "-j", "DROP")
        mend = "iptables -w -F"
    else:
        sh("ip", "link", "set", LINK, "down")
        mend = f"ip link set {LINK} up"
    if for_s is not None:
        subprocess.Popen(["sh", "-c", f"sleep {for_s}; {mend}"])


class Relay:
    """A stand-in for netem: a process that carries packets between two TUN devices, late, and not all of them.

    Packets of one direction keep their order.
    """

    def __init__(self, names: tuple[str, ...], weather: Weather) -> None:
        if not os.path.exists("/dev/net/tun"):
            raise UnavailableError("delay and loss need `tc netem` in the kernel, or /dev/net/tun for the relay")
        context = get_context("spawn")
        self._up, up = context.Pipe(duplex=False)
        self._process = context.Process(target=_carry, args=(up, names, weather), daemon=True)

    def start(self) -> None:
        self._process.start()
        if not self._up.poll(30) or (trouble := self._up.recv()):
            raise UnavailableError(f"the relay between TUN devices does not start: {trouble or 'no answer'}")

    def stop(self) -> None:
        self._process.kill()
        self._process.join()


def _carry(up, names: tuple[str, ...], weather: Weather) -> None:
    try:
        ends = [_open_tun(name) for name in names]
    except OSError as error:
        up.send(str(error))
        return
    up.send("")
    draw = random.Random(7)
    due: list[tuple[float, int, int, bytes]] = []
    last = [0.0, 0.0]
    for number in range(1 << 62):
        timeout = max(0.0, due[0][0] - time.monotonic()) if due else None
        for fd in select.select(ends, [], [], timeout)[0]:
            packet = os.read(fd, 65536)
            direction = ends.index(fd)
            if draw.random() * 100 >= weather.loss_percent:
                late_s = (weather.delay_ms + draw.uniform(-1, 1) * weather.jitter_ms) / 1e3
                last[direction] = max(last[direction], time.monotonic() + max(0.0, late_s))
                heapq.heappush(due, (last[direction], number, ends[1 - direction], packet))
        while due and due[0][0] <= time.monotonic():
            with contextlib.suppress(OSError):  # the device is not up yet
                os.write(due[0][2], due[0][3])
            heapq.heappop(due)


def _open_tun(name: str) -> int:
    enter(name)
    fd = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(
        fd, 0x400454CA, struct.pack("16sH22x", LINK.encode(), 0x0001 | 0x1000)
    )  # TUNSETIFF: IFF_TUN | IFF_NO_PI
    return fd
