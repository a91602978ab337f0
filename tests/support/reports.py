"""Run folders, and the text of their pages."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any


def folder_of(path: Path, rate: float = 1e-3, steps: int = 40, slow: float = 1.0, name: str = "made") -> Path:
    """An output folder of a run with three ranks; rank 2 works `slow` times as long as the others, which wait for
    it."""
    path.mkdir(parents=True)
    (path / "run.yaml").write_text(json.dumps({"name": name, "optim": {"learning_rate": rate}, "seed": 0}))
    metrics, ranks = [], []
    events: list[dict[str, Any]] = [
        {
            "time": 1000.0,
            "event": "start",
            "step": 0,
            "processes": 3,
            "hosts": ["one", "one", "two"],
            "devices": ["CPU", "CPU", "CPU"],
            "versions": {"torch": "2.13"},
            "launch": "launcher local",
            "clock": "host",
            "waits_inside": ["reduction", "overlapped"],
            "git": {"commit": "0123456789abcdef", "branch": "main", "changed": 2},
            "opening": {"model": "tiny"},
        }
    ]
    for step in range(10, steps + 1, 10):
        loss = 2.0 - step * rate * 10
        metrics.append({"step": step, "split": "train", "loss": loss, "padding": 1.25, "examples_per_s": 100.0})
        metrics.append({"step": step, "split": "validation", "loss": loss + 0.1, "accuracy": step / 100})
        work = [1.0, 1.0, slow]
        seconds = {
            "forward": [w * 0.4 for w in work],
            "backward": [w * 0.6 for w in work],
            "reduction": [0.2 + max(work) - w for w in work],
        }
        ranks.append({"time": 1000.0 + step, "step": step, "steps": 10, "ranks": 3, "seconds": seconds})
        events.append({"time": 1000.0 + step, "event": "checkpoint", "step": step})
    events.append({"time": 1001.0 + steps, "event": "finish", "step": steps, "weights": "ab" * 32})
    for file, lines in (("metrics", metrics), ("ranks", ranks), ("events", events)):
        (path / f"{file}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def text_of(page: Path) -> str:
    """Visible text of a page."""
    found: list[str] = []

    class Reader(HTMLParser):
        silent = False

        def handle_starttag(self, tag: str, attrs: Any) -> None:
            self.silent = tag == "style"

        def handle_data(self, data: str) -> None:
            if not self.silent and data.strip():
                found.append(data.strip())

    Reader().feed(page.read_text())
    return " ".join(" ".join(found).split())
