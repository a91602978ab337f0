"""Trainings of real libraries, traced through their doors: TRL, Lightning, cells of a notebook."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep_trace
from lockstep_trace.findings import findings, proved
from lockstep_trace.read import read

pytestmark = [pytest.mark.extras, pytest.mark.processes]

LIGHTNING = """
import sys, torch, lockstep_trace
import {library} as L
from torch import nn
class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))
    def training_step(self, batch, i):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])
    def validation_step(self, batch, i):
        self.log("loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))
    def configure_optimizers(self):
        parameters = self.net[0].parameters() if "part" in sys.argv else self.parameters()
        optimizer = torch.optim.AdamW(parameters, 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]
if __name__ == "__main__":
    L.seed_everything(3)
    x = torch.randn(64, 8)
    data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
    loader = torch.utils.data.DataLoader(data, 8, shuffle=True)
    checked = torch.utils.data.DataLoader(data, 8)
    ranks = int(sys.argv[1])
    trainer = L.Trainer(max_epochs=2, accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto",
                        logger=False, enable_progress_bar=False, enable_model_summary=False,
                        enable_checkpointing="saved" in sys.argv, callbacks=[lockstep_trace.LightningCallback("t")])
    trainer.fit(Model(), loader, checked)
    trainer.validate(Model(), checked, verbose=False)
"""


def lightning(place: Path, *words: str, library: str = "lightning") -> None:
    (place / "train.py").write_text(LIGHTNING.format(library=library))
    command = [sys.executable, "train.py", *words]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(("words", "world", "steps"), [(["1", "saved"], 1, 16), (["2"], 2, 8)])
def test_fit_of_lightning_is_traced_and_right(tmp_path: Path, words: list[str], world: int, steps: int) -> None:
    pytest.importorskip("lightning")
    lightning(tmp_path, *words)
    trace = read(tmp_path / "t")
    assert (trace.world, len(trace.steps(0)), trace.complete) == (world, steps, True)
    assert proved(findings(trace)) == []


def test_a_fault_in_lightning_is_found_under_its_older_name(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    lightning(tmp_path, "1", "part", library="pytorch_lightning")
    assert [f.code for f in findings(read(tmp_path / "t"))] == ["in-no-optimizer"]


def test_the_callback_of_lightning_can_be_sent_to_spawned_ranks() -> None:
    pytest.importorskip("lightning")
    again = pickle.loads(pickle.dumps(lockstep_trace.LightningCallback("t", "losses")))
    assert type(again) is type(lockstep_trace.LightningCallback())
    assert (again.recording.folder, again.recording.level) == ("t", "losses")
    with pytest.raises(ValueError, match="invalid value 'all'"):
        lockstep_trace.LightningCallback(level="all")
