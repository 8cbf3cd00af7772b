"""Top keys and token shift: against brute force, against stored vectors, and ties."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steadykv.errors import NonFiniteError, ShapeError
from steadykv.evaluation.metrics import token_shift
from steadykv.evaluation.metrics.selection import key_logits, shared_keys, top_keys

VECTORS = Path(__file__).parent / "vectors" / "vectors.npz"
KEY_CODECS = ["kivi_k", "qvg", "qvg4", "quantwm_k"]


def bf16(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


@pytest.mark.parametrize("codec", KEY_CODECS)
@pytest.mark.parametrize("case", ["a", "b"])
def test_token_shift_of_stored_vectors(case: str, codec: str) -> None:
    """An independent implementation of the same definition, on keys it decoded itself."""
    with np.load(VECTORS) as stored:
        keys = bf16(stored[f"{case}/in/X@bf16"])
        queries = bf16(stored[f"{case}/in/q_eval@bf16"])
        decoded = bf16(stored[f"{case}/{codec}/decoded@bf16"])
        expected = float(stored[f"{case}/{codec}/token_shift"])
    top1, top5 = token_shift(queries, keys, decoded)
    # Sums of 80 or 128 products in another order may swap two keys that score the same.
    assert top1.item() == pytest.approx(expected, abs=1.5 / (queries.numel() / queries.shape[-1]))
    assert 0.0 < top5.item() < top1.item()


def test_no_shift_without_change_and_full_shift_when_the_best_key_is_taken_away() -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn((2, 3, 40, 16), generator=generator).bfloat16()
    queries = torch.randn((2, 6, 9, 16), generator=generator)
    assert [x.item() for x in token_shift(queries, keys, keys)] == [0.0, 0.0]
    assert [x.item() for x in token_shift(queries, keys, -keys)] == [1.0, 1.0]
    # Rounding to BF16 happens to both sides: a smaller difference does not count.
    assert token_shift(queries, keys, keys.float() * (1 + 1e-4))[0].item() == 0.0


def test_lowest_index_wins_ties_at_every_place() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0, 3.0, 2.0])
    assert top_keys(logits.clone(), 5).tolist() == [1, 3, 5, 2, 4]
    assert top_keys(torch.zeros(4, 300), 3).tolist() == [[0, 1, 2]] * 4
    assert top_keys(torch.tensor([2.0, 5.0]), 5).tolist() == [1, 0]


@given(
    keys=st.integers(1, 60),
    count=st.integers(1, 6),
    levels=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_top_keys_are_those_of_a_stable_sort(keys: int, count: int, levels: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(0, levels, (3, 2, keys), generator=generator).float()
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    assert torch.equal(top_keys(logits.clone(), count), order[..., :count])


@pytest.mark.parametrize("query_heads", [2, 8, 14])
def test_query_heads_read_their_key_head(query_heads: int) -> None:
    generator = torch.Generator().manual_seed(1)
    queries = torch.randn((3, query_heads, 5, 8), generator=generator).bfloat16()
    keys = torch.randn((3, 2, 11, 8), generator=generator).bfloat16()
    logits = key_logits(queries, keys)
    assert logits.dtype == torch.float32
    for head in range(query_heads):
        for row in range(3):
            expected = queries[row, head].float() @ keys[row, head * 2 // query_heads].float().T
            torch.testing.assert_close(logits[row, head], expected)


def test_shared_keys_ignore_order() -> None:
    first = torch.tensor([[0, 1, 2], [5, 6, 7]])
    second = torch.tensor([[2, 0, 9], [1, 2, 3]])
    assert shared_keys(first, second).tolist() == [2, 0]


@pytest.mark.parametrize(("place", "name"), list(enumerate(["queries", "reference keys", "keys"])))
def test_nan_is_refused_by_name(place: int, name: str) -> None:
    tensors = [torch.ones(1, 4, 3, 8), torch.ones(1, 2, 6, 8), torch.ones(1, 2, 6, 8)]
    tensors[place][0, 1, 2, 3] = torch.nan
    with pytest.raises(NonFiniteError, match=rf"^{name} hold NaN"):
        token_shift(*tensors)


def test_shapes_that_do_not_fit_are_refused() -> None:
    queries, keys = torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 6, 8)
    with pytest.raises(ShapeError, match="same tokens"):
        token_shift(queries, keys, keys[:, :, :5])
    with pytest.raises(ShapeError, match="no queries or no keys"):
        token_shift(queries, keys[:, :, :0], keys[:, :, :0])
    with pytest.raises(ShapeError, match="multiple"):
        key_logits(queries[:, :3], keys)
    with pytest.raises(ShapeError, match=r"expected \[1, heads, tokens, 8\]"):
        key_logits(queries, keys[..., :4])
