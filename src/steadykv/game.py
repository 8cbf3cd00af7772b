"""The game behind the embedded worlds: its buttons and its steps.

For whoever steers it, reckons where a walk stands, or looks at what it shows; without PyTorch,
which every process that records a walk would otherwise load.
"""

from __future__ import annotations

FORWARD, LEFT, RIGHT, USE = 1, 2, 4, 8
"""Buttons of an action, as bits."""
TICS_PER_FRAME = 2
"""Steps of the game for each frame."""
PATCH_TURN_DEGREES = 683 * 360 / 65536
"""A tic of turning in worlds of panoramas; the game's angles have 65,536 steps, and 683 of them are
half a patch of 8 pixels in a frame of 96 that shows 90 degrees."""
