"""Files of OUTPUT that became links while training are not written through."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.config.output_files import replace_text
from lockstep.distributed.event_log import EventLog
from lockstep.launchers.processes import output_lock
from lockstep.track.console import append
from lockstep.track.jsonl import Lines
from support.messages import raises


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "log.txt", "report.html"])
def test_nothing_is_written_through_a_link(name: str, tmp_path: Path) -> None:
    (theirs := tmp_path / "theirs").write_text("{}\n")
    (folder := tmp_path / "out").mkdir()
    path, world = folder / name, SimpleNamespace(is_main=True)
    log, lines = EventLog(world, folder), Lines(path, 0)  # type: ignore[arg-type]
    writes: dict[str, Any] = {
        "metrics.jsonl": lambda: lines.add({"step": 1}),
        "events.jsonl": lambda: log.event("start", 1),
        "log.txt": lambda: append(path, "a line"),
        "report.html": lambda: replace_text(path, "a page"),
    }
    writes[name]()
    assert path.stat().st_size > 0
    path.unlink()
    path.symlink_to(theirs)
    if name == "metrics.jsonl":
        with pytest.raises(OSError, match=f"{path} is a link to {theirs}, and nothing is written through it"):
            lines.add({"step": 2})
    else:
        writes[name]()
    assert theirs.read_text() == "{}\n"
    if name == "report.html":
        assert path.read_text() == "a page"
        return
    with raises("LS7348", name, str(theirs)):
        output_lock.check_ours(folder)
    path.unlink()
    writes[name]()
    assert path.read_text().count("\n") == (2 if name == "metrics.jsonl" else 1)  # the queued line came, too
