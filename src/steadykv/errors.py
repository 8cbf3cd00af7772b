"""Errors of the public boundary. A message is one line: got, expected, how to fix it."""

__all__ = [
    "BackendUnavailable",
    "CalibrationError",
    "ConfigError",
    "HostError",
    "NonFiniteError",
    "PayloadError",
    "PositionError",
    "ShapeError",
    "SteadyKVError",
]


class SteadyKVError(Exception):
    """Base of every error that steadykv raises on purpose."""


class ConfigError(SteadyKVError, ValueError):
    """A configuration value, or a combination of values, that means nothing."""


class HostError(SteadyKVError, TypeError):
    """A model that no adapter knows, that has changed, or that uses its cache in another way."""


class ShapeError(SteadyKVError, ValueError):
    """A tensor whose shape, dtype or device does not fit the call."""


class NonFiniteError(SteadyKVError, ValueError):
    """NaN or Inf in keys, values or queries; raised in debug mode, counted on the device else."""


class PositionError(SteadyKVError, ValueError):
    """A write that does not start where the open chunk starts or ends."""


class BackendUnavailable(SteadyKVError, RuntimeError):
    """An implementation was asked for by name and cannot run here."""


class PayloadError(SteadyKVError, ValueError):
    """A stored payload whose header, tensors or version are not what they claim to be."""


class CalibrationError(SteadyKVError, ValueError):
    """A calibration that is missing, does not fit, or is not what its file claims to be."""
