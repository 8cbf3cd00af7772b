"""The tokenizer: an orthogonal code, its scaling, and what it leaves out."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from steadykv.errors import ConfigError
from steadykv.world import WorldConfig, load_episodes, load_world
from steadykv.world.tokenizer import Tokenizer

CONFIG = WorldConfig(image_height=24, image_width=36, channels=30)


def pictures(count: int = 200) -> torch.Tensor:
    """Smooth frames uint8 [N,H,W,3] with a little noise."""
    generator = torch.Generator().manual_seed(1)
    coarse = torch.rand(count, 3, 5, 7, generator=generator)
    size = (CONFIG.image_height, CONFIG.image_width)
    smooth = torch.nn.functional.interpolate(coarse, size=size, mode="bilinear")
    noise = torch.randn(smooth.shape, generator=generator) * 0.02
    return ((smooth + noise).movedim(1, -1) * 255).clamp(0, 255).to(torch.uint8)


def fitted(power: float, largest: float = 1.5, channels: int = 30) -> Tokenizer:
    tokenizer = Tokenizer(dataclasses.replace(CONFIG, channels=channels))
    tokenizer.fit(pictures(), power, largest)
    return tokenizer


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_components_have_the_asked_spread_and_do_not_correlate(power: float) -> None:
    """Deviations fall as d**(1 - power); the first is `largest`."""
    latents = fitted(power).encode(pictures()[None]).flatten(0, 2).double()
    covariance = latents.T.cov()
    spread = covariance.diagonal().sqrt()
    assert spread[0].item() == pytest.approx(1.5, rel=1e-3)
    off = covariance - covariance.diagonal().diag()
    assert (off.abs() < 1e-3 * spread[:, None] * spread).all()
    raw = fitted(0.0).encode(pictures()[None]).flatten(0, 2).double().std(0)
    expected = (raw / raw[0]) ** (1 - power)
    torch.testing.assert_close(spread / spread[0], expected, rtol=1e-3, atol=1e-5)


def test_all_components_restore_every_pixel() -> None:
    frames = pictures(8)[None]
    tokenizer = fitted(0.5, channels=108)
    assert (tokenizer.decode(tokenizer.encode(frames)).int() - frames.int()).abs().max() <= 1


def test_patches_are_where_they_were() -> None:
    """A change of one patch changes the latents of its token alone, and comes back in place."""
    tokenizer = fitted(0.5, channels=108)
    frames = pictures(1)[None].clone()
    before = tokenizer.encode(frames)
    frames[0, 0, 6:12, 12:18] = 255 - frames[0, 0, 6:12, 12:18]  # row 1, column 2 of 4 x 6
    changed = (tokenizer.encode(frames) - before).abs().amax(-1)[0, 0] > 1e-3
    assert changed.nonzero().flatten().tolist() == [1 * 6 + 2]
    assert (tokenizer.decode(tokenizer.encode(frames)).int() - frames.int()).abs().max() <= 1


def test_fewer_components_lose_the_least_possible() -> None:
    """No other 30 directions leave a smaller squared error: it is the rest of the spectrum."""
    patches = fitted(0.0)._patches(pictures()[None]).flatten(0, 2).double() / 255
    rest = torch.linalg.eigvalsh(patches.T.cov(correction=0))[:-30].sum()
    tokenizer = fitted(0.5)
    error = tokenizer.pixels(tokenizer.encode(pictures()[None]))[0].double() - pictures() / 255.0
    assert error.square().sum().item() / len(patches) == pytest.approx(rest.item(), rel=1e-3)


def test_too_many_channels_are_refused() -> None:
    with pytest.raises(ConfigError, match="channels: got 109, expected at most the 108"):
        dataclasses.replace(CONFIG, channels=109)


def test_the_shipped_tokenizer_hides_nothing_visible() -> None:
    """Above 40 dB on held-out frames: errors of the model are not those of its tokenizer."""
    tokenizer, frames = load_world().tokenizer, load_episodes(16).frames
    error = (tokenizer.decode(tokenizer.encode(frames)).float() - frames.float()).square().mean()
    assert 10 * torch.log10(255**2 / error) > 40
