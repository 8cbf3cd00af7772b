"""The one field of a policy that a method's string takes."""

from __future__ import annotations

import pytest

from steadykv.config import CachePolicy, CodecConfig, parse_method
from steadykv.errors import ConfigError
from steadykv.evaluation.protocol import Protocol

REFINED = "qvg@metadata=int8+refinement=2"


def test_a_method_may_say_how_many_spans_keep_their_refinement() -> None:
    for text in (
        f"{REFINED}+refined_spans=3",
        f"{REFINED}+refined_spans=3:bf16",
        f"bf16:{REFINED}+refined_spans=3",
        f"bf16@refined_spans=3:{REFINED}",
        f"{REFINED}+refined_spans=3:{REFINED}+refined_spans=3",
    ):
        assert parse_method(text).policy == CachePolicy(refined_spans=3)
    assert parse_method(f"{REFINED}+refined_spans=0").policy.refined_spans == 0
    codec = CodecConfig("qvg", metadata="int8", refinement=2)
    assert parse_method(f"{REFINED}+refined_spans=3").keys == codec


def test_a_comparison_keeps_it_under_its_own_policy() -> None:
    text = f"{REFINED}+refined_spans=3"
    policy = Protocol((text,), policy=CachePolicy(span_chunks=4)).configurations()[text].policy
    assert policy == CachePolicy(span_chunks=4, refined_spans=3)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("qvg@refined_spans=2", "refined_spans changes nothing"),
        ("bf16:qvg4@refined_spans=2", "refined_spans changes nothing"),
        (f"{REFINED}+refined_spans=-1", "refined_spans is -1"),
        (f"{REFINED}+refined_spans=two", "refined_spans is 'two'"),
        (f"{REFINED}+refined_spans=2:{REFINED}+refined_spans=3", "two policies"),
        (f"{REFINED}+refined_spans=1:{REFINED}+refined_spans=3", "two policies"),  # 1: the default
        (f"kivi_recent:{REFINED}+refined_spans=3", "two policies"),
    ],
)
def test_one_that_changes_nothing_or_two_are_refused(text: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word) as caught:
        parse_method(text)
    assert "\n" not in str(caught.value)
