"""`attach`: a host runs with steadykv's caches inside a block, and is untouched outside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from steadykv.codecs import Calibration
from steadykv.config import CacheConfig, parse_method
from steadykv.errors import CalibrationError, ConfigError, HostError
from steadykv.hosts.adapter import Session
from steadykv.hosts.attached import AttachedCaches
from steadykv.hosts.contract import describe
from steadykv.hosts.registry import adapter_named, find

__all__ = ["attach"]

_claimed: set[int] = set()  # ids of objects that blocks have changed, which keep them alive


@contextmanager
def attach(
    host: Any,
    preset: str | CacheConfig = "quantwm",
    *,
    config: CacheConfig | None = None,
    adapter: str | None = None,
    calibration: Calibration | None = None,
    debug: bool = False,
    **options: Any,
) -> Iterator[AttachedCaches]:
    """Let a model keep its key/value cache in steadykv while the block runs.

        with skv.attach(pipeline, preset="quantwm") as caches:
            video = pipeline.inference(...)
        print(caches.ledger())

    host: what the adapter's page in docs/hosts names: the pipeline, or the model itself.
    preset: a preset's name, a method such as "quantwm:bf16" (keys:values), or a configuration, such
    as skv.preset("quantwm", centroids=64, span_chunks=2). config: the same, by another name.
    adapter: its name, where several know the host. calibration: for codecs that ask for one. debug:
    see `KVCache`. options: of the adapter, listed on its page.

    Nothing of the host is edited but attributes of its objects, which are put back at the end of
    the block, also after an exception. The caches stay readable after it.
    Raises HostError for a host that no adapter knows, that differs from what its adapter expects
    or that is attached already, ConfigError for an unknown preset or option and CalibrationError:
    each before anything is changed. A policy that contradicts the host's own window is a
    ConfigError when the host makes its caches.
    """
    chosen = find(host) if adapter is None else adapter_named(adapter)
    unknown = sorted(set(options) - set(chosen.options))
    if unknown:
        known = ", ".join(sorted(chosen.options)) or "none"
        raise ConfigError(
            f"attach got {', '.join(unknown)}: expected options of {chosen.name} ({known}); fields "
            "of a configuration go through preset=skv.preset(name, FIELD=...)"
        )
    wanted = _checked_config(preset, config, calibration)
    try:
        chosen.check(host)
    except (AttributeError, KeyError, IndexError) as error:
        got = f"{chosen.title}: got a {describe(host)}"
        raise HostError(f"{got} ({error}): expected {chosen.expects}") from error
    session = Session(chosen, wanted, options, calibration, debug)
    session.patches.claim(host)
    mine: set[int] = set()
    try:
        chosen.install(session, host)
        claimed = session.patches.owners
        if taken := _claimed.intersection(claimed):
            raise HostError(
                f"{describe(claimed[taken.pop()])} is attached already: expected one block at a "
                "time; leave the first one before attaching again"
            )
        mine = set(claimed)
        _claimed.update(mine)
        yield session.caches
        _tell_dense(session)
    finally:
        session.patches.undo()
        _claimed.difference_update(mine)


def _checked_config(preset: object, config: object, calibration: Calibration | None) -> CacheConfig:
    """The configuration that is asked for. Raises ConfigError, CalibrationError."""
    wanted = preset if config is None else config
    if isinstance(wanted, str):
        wanted = parse_method(wanted)
    if not isinstance(wanted, CacheConfig):
        name = "preset" if config is None else "config"
        raise ConfigError(
            f"{name} is {wanted!r}: expected a name, such as 'quantwm', or a CacheConfig"
        )
    if not isinstance(calibration, Calibration | None):
        raise CalibrationError(
            f"calibration is a {type(calibration).__name__}: expected a steadykv.Calibration"
        )
    if wanted.needs_calibration and calibration is None:
        raise CalibrationError(
            f"{wanted.name} needs a calibration: expected calibration=Calibration.load(file), "
            "which `steadykv calibrate` makes"
        )
    return wanted


def _tell_dense(session: Session) -> None:
    """Warn, at the end of a block, of spans that would not have shrunk, or of a cache that grew."""
    if session.config.keys.is_dense and session.config.values.is_dense:
        return
    help_ = (
        "give a codebook more tokens (span_chunks=) or fewer centroids, with preset=skv.preset(...)"
    )
    for cache in session.caches:
        for segment in cache[0].status().segments:
            if "bits per element predicted" in segment.reason:
                session.warn(
                    f"spans of {segment.tokens} tokens stay dense ({segment.reason}): {help_}"
                )
                return
    if len(session.caches) and session.caches.ledger().compression < 1:
        session.warn(f"the cache takes more memory than in BF16: {help_}")
