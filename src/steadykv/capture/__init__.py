"""Captures: keys, values and later queries of a run, by layer and span, in one safetensors file.

`RecordingCache` stands around any cache that a host uses; `write_capture` puts what it saw into a
file and `open_capture` reads that file, or a user's own; `calibrate` fits fixed levels to it.
"""

from steadykv.capture.calibrate import calibrate
from steadykv.capture.format import CapturedSpan, CaptureHeader, SpanEntry, write_capture
from steadykv.capture.plan import PlannedSpan, plan_spans, predicted_nbytes
from steadykv.capture.reader import CaptureFile, SpanTensors, open_capture
from steadykv.capture.recorder import RecordingCache, RecordingLayer
from steadykv.capture.rotation import rotate_pairs
from steadykv.capture.selection import Selection

__all__ = [
    "CaptureFile",
    "CaptureHeader",
    "CapturedSpan",
    "PlannedSpan",
    "RecordingCache",
    "RecordingLayer",
    "Selection",
    "SpanEntry",
    "SpanTensors",
    "calibrate",
    "open_capture",
    "plan_spans",
    "predicted_nbytes",
    "rotate_pairs",
    "write_capture",
]
