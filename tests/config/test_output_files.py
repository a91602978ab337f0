"""Files of OUTPUT that became links while training are not written through."""

import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lockstep.config.output_files import replace_text
from lockstep.distributed.event_log import EventLog
from lockstep.launchers import output_lock
from lockstep.track.console import append
from lockstep.track.jsonl import Lines
from lockstep.training import reference_pass
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


def test_reference_outputs_that_do_not_fit_are_refused_before_training(tmp_path: Path) -> None:
    path, limits = tmp_path / "reference.safetensors", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        fault = reference_pass._write(path, {"train": np.ones((500, 2))}, "key")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"{path}: " in str(fault)
    assert "ulimit -f" in str(fault)
    assert list(tmp_path.iterdir()) == []
    assert reference_pass._write(path, {"train": np.ones((500, 2))}, "key") is None
    assert path.is_file()
