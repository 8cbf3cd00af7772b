"""Methods with fixed levels: whether their calibration fits, and what results say of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from steadykv.capture import CaptureFile
from steadykv.codecs import Calibration
from steadykv.config import CacheConfig
from steadykv.errors import CalibrationError, ConfigError


def check_need(
    configs: Mapping[str, CacheConfig], is_calibrated: bool, option: str
) -> tuple[str, ...]:
    """The methods that read a calibration; `option` names the way to give one.

    Raises ConfigError where one is missing, and where one is given that nothing reads.
    """
    needing = tuple(method for method, config in configs.items() if config.needs_calibration)
    if needing and not is_calibrated:
        raise ConfigError(
            f"method {needing[0]!r} needs a calibration; expected what steadykv calibrate wrote "
            f"({option}), or a method with levels='online', such as kvquant"
        )
    if is_calibrated and not needing:
        raise ConfigError(
            f"calibration: got one, but none of {', '.join(configs)} reads it; expected "
            "kvquant_calibrated among the methods, or no calibration"
        )
    return needing


def check_for_file(
    calibration: Calibration | None, configs: Mapping[str, CacheConfig], file: CaptureFile
) -> None:
    """As `check_need`; and CalibrationError for one that does not fit a method or the file."""
    needing = check_need(configs, calibration is not None, "tensors --calibration FILE")
    if calibration is None:
        return
    header = file.header
    key_rope = None if header is None else header.key_rope
    for method in needing:
        for cell in file.cells:
            shape = file.shape(cell)
            assert shape is not None, "every cell has k"
            calibration.check(configs[method], cell[:1], shape[1], shape[3], key_rope)
    kept = calibration.source.get("heads")
    if header is not None and kept is not None and kept != list(header.heads):
        raise CalibrationError(
            f"calibrated on heads {kept}, got heads {list(header.heads)}: expected the same ones; "
            "capture and calibrate with equal --heads"
        )


def describe_calibration(
    calibration: Calibration, judged: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """JSON-able: file, frame of the keys, most tokens that a grid was fitted to, and shared walks.

    judged: the rows that methods are judged on, such as {"episode": …, "seed": …}. "shared_walks"
    are those that the calibration was fitted to as well, whatever their noise.
    """
    rows = calibration.source.get("rows")
    fitted = [_walk(row) for row in rows] if isinstance(rows, list) else []
    return {
        "file": calibration.source.get("file"),
        "key_rope": calibration.key_rope,
        "tokens": max((grid.tokens for grid in calibration.grids.values()), default=0),
        "shared_walks": [walk for walk in map(_walk, judged) if walk and walk in fitted],
    }


def _walk(row: Any) -> str:
    """A row without its noise, as text; empty for what is no row."""
    if not isinstance(row, Mapping):
        return ""
    return ", ".join(str(value) for name, value in row.items() if name != "seed")
