"""`steadykv ablate`: one question of the papers, answered by a comparison of its caches."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from steadykv.cli.common import (
    checked_device,
    checked_methods,
    new_folder,
    progress_bar,
)
from steadykv.cli.compare import BATCH
from steadykv.cli.new_files import check_distinct, new_file, write_table
from steadykv.cli.options import (
    Batch,
    Centroids,
    Device,
    Frames,
    Json,
    Out,
    Rows,
    SeedCount,
    Store,
    WalkCount,
    Walks,
    World,
)
from steadykv.evaluation.ablations import ABLATIONS, ablation


def ablate(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help=f"One of: {' '.join(ABLATIONS)}.")],
    episodes: WalkCount = 8,
    seeds: SeedCount = 1,
    frames: Frames = 24,
    centroids: Centroids = 32,
    device: Device = "cpu",
    batch: Batch = None,
    out: Out = None,
    rows: Rows = None,
    world: World = None,
    walks: Walks = None,
    store: Store = None,
    json: Json = False,
) -> None:
    """Answer one question of the papers: its caches side by side, differences with intervals."""
    with progress_bar() as advance:
        chosen = ablation(name)
        plans = [{"span_chunks": 2, **group.policy} for group in chosen.groups]
        names = [
            checked_methods(group.methods, policy, centroids, chosen.paired)
            for group, policy in zip(chosen.groups, plans, strict=True)
        ]
        folder = new_folder(out, f"ablate-{name}")
        table = None if rows is None else new_file(rows, "--rows")
        place = checked_device(device)
        from steadykv.cli.session import Session, network_dtype
        from steadykv.evaluation.results import write_csv
        from steadykv.evaluation.store import chosen_store

        shared = chosen_store(store)
        check_distinct({"--out": folder, "--rows": table, "--store": shared})
        options: dict[str, Any] = {
            "centroids": centroids,
            "max_batch": batch or BATCH[place.type],
            "paired_against": chosen.paired,
        }
        finished, all_rows = [], []
        for group, policy, methods in zip(chosen.groups, plans, names, strict=True):
            session = Session(
                kind="ablate",
                store=shared,
                folder=folder if len(chosen.groups) == 1 else folder / group.label,
                methods=methods,
                episodes=episodes,
                seeds=range(seeds),
                frames=frames,
                device=place,
                dtype=network_dtype(place),
                policy=policy,
                options=options | {"key_rope": group.key_rope},
                arguments=context.obj,
                as_json=json,
                world=world,
                walks=walks,
            )
            result = session.run(advance)
            finished.append((session, result))
            all_rows += [{"ablation": name, "group": group.label, **row} for row in result.rows]
            if table is not None and len(finished) == 1:
                write_table(table, all_rows, "--rows")
            elif table is not None:
                write_csv(table, all_rows)
    if not json:
        print(f"{chosen.question} ({chosen.source})")
    for session, result in finished:
        session.show(result)
