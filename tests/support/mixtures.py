"""Runs with several sources."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import datasets

from lockstep.config.run import Run
from support.harness import tiny


def texts(folder: Path, name: str, count: int, **more: Any) -> Path:
    rows = [{"text": f"{name} says {i}", "label": "joy" if i % 2 else "fear"} | more for i in range(count)]
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def mixed(folder: Path, *overrides: str, weights: tuple[Any, ...] = (None, None, None), **values: Any) -> Run:
    """Three sources with different formats, columns and label types."""
    texts(folder, "web", 60)
    other = [{"said": {"text": f"book says {i}"}, "mood": i % 2, "kind": "a" if i < 50 else "b"} for i in range(60)]
    moods = datasets.ClassLabel(names=["fear", "joy"])
    features = datasets.Features(
        {"said": {"text": datasets.Value("string")}, "mood": moods, "kind": datasets.Value("string")}
    )
    datasets.Dataset.from_list(other, features).to_parquet(folder / "book.parquet")
    table = "".join(f'"chat says {i}",{"joy" if i % 2 else "fear"}\n' for i in range(20))
    (folder / "chat.csv.gz").write_bytes(gzip.compress(table.encode()))
    (folder / "chat_dev.csv").write_text('"chat asks 1",joy\n"chat asks 2",fear\n')
    sources: list[dict[str, Any]] = [
        {"source": str(folder / "web.jsonl")},
        {
            "source": str(folder / "book.parquet"),
            "rename": {"text": "said.text", "label": "mood"},
            "filter": {"kind": "a"},
        },
        {
            "name": "chat",
            "train": str(folder / "chat.csv.gz"),
            "validation": str(folder / "chat_dev.csv"),
            "columns": ["text", "label"],
        },
    ]
    for source, weight in zip(sources, weights, strict=True):
        source |= {} if weight is None else {"weight": weight}
    return tiny(*overrides, data={"sources": sources, "max_length": 32}, **values)
