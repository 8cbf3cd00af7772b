"""Attaching to models as they are: one file per host family."""

from steadykv.hosts.adapter import Adapter, Session
from steadykv.hosts.attached import AttachedCaches
from steadykv.hosts.attaching import attach
from steadykv.hosts.registry import adapters

__all__ = ["Adapter", "AttachedCaches", "Session", "adapters", "attach"]
