"""Transports: how rank 0's tensors reach the other ranks of a group. One interface, one conformance suite."""

from specsync_core.transports.base import Transport
from specsync_core.transports.choose import Choice, choose_transport

__all__ = ["Choice", "Transport", "choose_transport"]
