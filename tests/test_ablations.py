"""Every ablation can run as it stands: known methods, one policy a group, its pair among them."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from steadykv.cli.main import main
from steadykv.config import CachePolicy
from steadykv.errors import ConfigError
from steadykv.evaluation.ablations import ABLATIONS, Ablation, ablation
from steadykv.evaluation.protocol import Protocol
from steadykv.world.episodes import save_episodes
from steadykv.world.weights import save_world
from tests.worlds import TINY, tiny_episodes, tiny_world


@pytest.mark.parametrize("entry", ABLATIONS.values(), ids=lambda entry: entry.name)
def test_every_group_is_a_valid_comparison(entry: Ablation) -> None:
    assert entry.question.endswith("?")
    assert "arXiv" in entry.source
    labels = [group.label for group in entry.groups]
    assert len(set(labels)) == len(labels)
    for group in entry.groups:
        policy = CachePolicy(**{"span_chunks": 2, **group.policy})
        protocol = Protocol(
            group.methods, policy=policy, paired_against=entry.paired, key_rope=group.key_rope
        )
        configs = protocol.configurations()
        # two names for one cache would look like two results
        distinct = {(config.keys, config.values, config.policy) for config in configs.values()}
        assert len(distinct) == len(configs)


def test_an_unknown_ablation_is_named() -> None:
    with pytest.raises(ConfigError, match="known are methods, split, parts, rank"):
        ablation("nope")


def test_ablate_writes_the_rows_of_all_groups(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_world(tmp_path / "world.safetensors", TINY, tiny_world().state_dict(), {})
    save_episodes(tmp_path / "walks.zip", tiny_episodes(2))
    out, table = tmp_path / "out", tmp_path / "rows.csv"
    code = main(["ablate", "span", "--world", str(tmp_path / "world.safetensors"),
                 "--walks", str(tmp_path / "walks.zip"), "--episodes", "2", "--frames", "15",
                 "--centroids", "8", "--out", str(out), "--rows", str(table)])  # fmt: skip
    assert code == 0
    assert {path.name for path in out.iterdir()} == {"1-chunks", "2-chunks", "3-chunks"}
    assert all((path / "report.html").exists() for path in out.iterdir())
    rows = list(csv.DictReader(table.open()))
    methods = ["bf16", "qvg4", "quantwm", "floor"]
    assert [row["method"] for row in rows] == methods * 3
    assert {row["ablation"] for row in rows} == {"span"}
    assert [row["group"] for row in rows[::4]] == ["1-chunks", "2-chunks", "3-chunks"]
    bits = [float(row["bits_per_element"]) for row in rows if row["method"] == "qvg4"]
    assert bits[0] > bits[1] > bits[2]
    assert ABLATIONS["span"].question in capsys.readouterr().out
