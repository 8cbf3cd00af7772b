"""The papers' ablations: which caches one comparison has to set side by side.

Each is a list of groups; the methods of a group run under one policy. What the papers report and
what came out here is in `docs/ablations.md`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from steadykv.errors import ConfigError

__all__ = ["ABLATIONS", "Ablation", "Group", "ablation"]


@dataclass(frozen=True)
class Group:
    """Methods that are compared under one policy; `label` tells the groups of an ablation apart.

    key_rope: whether the cache holds keys after ("post") or before ("pre") rotary embedding.
    """

    methods: tuple[str, ...]
    label: str = "all"
    policy: dict[str, int] = field(default_factory=dict)
    key_rope: str = "post"


@dataclass(frozen=True)
class Ablation:
    """A question, where the papers ask it, and the caches that answer it.

    paired: the method from which each other one's difference is reported, in every group.
    """

    name: str
    question: str
    source: str
    groups: tuple[Group, ...]
    paired: str


def _vary(base: str, field_name: str, values: tuple[object, ...]) -> tuple[str, ...]:
    return tuple(f"{base}@{field_name}={value}" for value in values)


def _policies(methods: tuple[str, ...], policies: dict[str, dict[str, int]]) -> tuple[Group, ...]:
    return tuple(Group(methods, label, policy) for label, policy in policies.items())


_STARTS = ("false", "true", "ids")

_LIST = (
    Ablation(
        "methods",
        "Which method keeps the video, and at how many bits?",
        "arXiv 2602.02958, table 1; arXiv 2609.26425, tables 3 and 4",
        (
            Group(
                (
                    "rtn",
                    "rtn_g16_sym",
                    "kivi",
                    "kvquant",
                    "quarot",
                    "qvg",
                    "qvg_pro",
                    "qvg4",
                    "quantwm",
                    "steady",
                )
            ),
        ),
        paired="quantwm",
    ),
    Ablation(
        "split",
        "Is it the keys or the values that cost the video?",
        "arXiv 2609.26425, tables 1 and 2",
        (Group(("qvg", "qvg:bf16", "bf16:qvg", "quantwm", "quantwm:bf16", "bf16:quantwm")),),
        paired="quantwm",
    ),
    Ablation(
        "parts",
        "What do the fourth level, QSAC and PSAC each bring?",
        "arXiv 2609.26425, table 5",
        # candidates=1 takes the nearest centroid, metric=none by plain distance: PSAC alone
        (
            Group(
                (
                    "qvg",
                    "qvg4",
                    "quantwm@rank=0",
                    "quantwm@candidates=1+metric=none",
                    "quantwm",
                )
            ),
        ),
        paired="qvg4",
    ),
    Ablation(
        "rank",
        "How many query directions does the correction need?",
        "arXiv 2609.26425, table 9",
        (Group(_vary("quantwm", "rank", (0, 2, 4, 8, 16, 32))),),
        paired="quantwm@rank=8",
    ),
    Ablation(
        "metric",
        "Is the diagonal of the query moment enough to choose a centroid?",
        "arXiv 2609.26425, table 10",
        (Group(_vary("quantwm", "metric", ("none", "diagonal", "full"))),),
        paired="quantwm@metric=diagonal",
    ),
    Ablation(
        "candidates",
        "How many centroids should compete on their residual's range?",
        "arXiv 2609.26425, table 11",
        (Group(_vary("quantwm", "candidates", (1, 2, 4, 8, 16, 32))),),
        paired="quantwm@candidates=4",
    ),
    Ablation(
        "stages",
        "What do more residual stages buy?",
        "arXiv 2602.02958, section 5.4 and QVG-Pro",
        (Group(_vary("qvg", "stages", (1, 2, 3, 4))),),
        paired="qvg@stages=1",
    ),
    Ablation(
        "group_size",
        "How fine must the scales be?",
        "arXiv 2602.02958, section 5.4",
        (Group(_vary("qvg", "group_size", (16, 32, 64, 128))),),
        paired="qvg@group_size=64",
    ),
    Ablation(
        "centroids",
        "How many centroids does a span of this size want?",
        "arXiv 2602.02958, table 5",
        (Group(_vary("qvg4", "centroids", (8, 16, 32, 64, 128))),),
        paired="qvg4@centroids=32",
    ),
    Ablation(
        "bits",
        "What do three and four bits buy?",
        "arXiv 2602.02958, table 1 (INT2 and INT4)",
        (Group(tuple(m for b in ("kivi", "qvg", "quantwm") for m in _vary(b, "bits", (2, 3, 4)))),),
        paired="quantwm@bits=2",
    ),
    Ablation(
        "formats",
        "What do cheaper centroids, scales and codes cost?",
        "arXiv 2602.02958, section 4.2; arXiv 2609.26425, appendix D",
        (
            Group(
                (
                    "qvg",
                    "qvg@metadata=int8",
                    "qvg@packing=trits",
                    "qvg@centroid_format=fp8",
                    "qvg4",
                    "qvg4@metadata=fp8",
                    "qvg4@centroid_format=fp8",
                )
            ),
        ),
        paired="qvg4",
    ),
    Ablation(
        "warm",
        "How many iterations does k-means save that starts from the span before?",
        "arXiv 2602.02958, section 4.3",
        (
            Group(
                (
                    *(
                        f"qvg4@iterations={n}+warm_start={start}"
                        for n in (1, 2, 4)
                        for start in _STARTS
                    ),
                    "qvg4@iterations=16+warm_start=false",
                )
            ),
        ),
        paired="qvg4@iterations=2+warm_start=false",
    ),
    Ablation(
        "frame",
        "Are keys packed better before or after their rotary embedding?",
        "arXiv 2401.18079, section 3.2; arXiv 2602.02958, section 5.3",
        tuple(
            Group(("kivi", "kvquant", "qvg", "qvg4", "quantwm"), rope, key_rope=rope)
            for rope in ("post", "pre")
        ),
        paired="quantwm",
    ),
    Ablation(
        "span",
        "What does a longer span save in bits, and cost in dense tokens that wait?",
        "arXiv 2602.02958, overhead by span length",
        _policies(
            ("qvg4", "quantwm"),
            {f"{n}-chunks": {"span_chunks": n} for n in (1, 2, 3)},
        ),
        paired="quantwm",
    ),
    Ablation(
        "policy",
        "What do tokens kept in BF16 at either end bring?",
        "arXiv 2402.02750 and the release of arXiv 2602.02958 (sink 1, recent 1)",
        _policies(
            ("kivi", "qvg", "quantwm"),
            {
                "none": {},
                "sink": {"sink_keep": 3},
                "recent": {"recent_keep": 1},
                "both": {"sink_keep": 3, "recent_keep": 1},
            },
        ),
        paired="quantwm",
    ),
)

ABLATIONS: dict[str, Ablation] = {entry.name: entry for entry in _LIST}


def ablation(name: str) -> Ablation:
    """The ablation of that name. Raises ConfigError, naming those there are."""
    if name not in ABLATIONS:
        raise ConfigError(f"unknown ablation {name!r}: known are {', '.join(ABLATIONS)}")
    return ABLATIONS[name]
