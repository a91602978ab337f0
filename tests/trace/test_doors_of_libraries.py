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


TRL = """
import random
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
import lockstep_trace
words = "the a cat dog sat ran on mat red blue is not sky sea sun .".split()
inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["<pad>", "<eos>", "<unk>", *words])}, "<unk>"))
inner.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
config = GPT2Config(vocab_size=32, n_positions=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1)
draw = random.Random(0)
texts = [" ".join(draw.choice(words) for _ in range(draw.randint(4, 12))) for _ in range(32)]
options = dict(output_dir="out", max_steps=3, per_device_train_batch_size=4, report_to=[], save_strategy="no",
               disable_tqdm=True, use_cpu=True, bf16=False, gradient_checkpointing=False, max_length=32)
for folder, kind, settings, columns in (
    ("sft", SFTTrainer, SFTConfig, {"text": texts}),
    ("dpo", DPOTrainer, DPOConfig, {"prompt": ["is the sky blue"] * 16, "chosen": texts[:16], "rejected": texts[16:]}),
):
    reference = {"ref_model": GPT2LMHeadModel(config)} if folder == "dpo" else {}
    kind(GPT2LMHeadModel(config), **reference, args=settings(**options), train_dataset=Dataset.from_dict(columns),
         processing_class=tokenizer, callbacks=[lockstep_trace.Callback(folder)]).train()
"""


def test_trainers_of_trl_are_traced_and_right(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    (tmp_path / "train.py").write_text(TRL)
    command = [sys.executable, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for folder in ("sft", "dpo"):
        trace = read(tmp_path / folder)
        assert trace.steps(0) == [0, 1, 2]
        assert proved(findings(trace)) == []


CELLS = (
    "import lockstep_trace",
    "import torch\nmodel = torch.nn.Linear(4, 2)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
    "with lockstep_trace.traced(model, optimizer, folder='a') as folder:\n    for _ in range({steps}):\n"
    "        {zero}model(torch.ones(2, 4)).square().mean().backward()\n        optimizer.step()",
    "from lockstep_trace.commands import main\nmain(['watch', 'a'])",
)


def test_cells_of_a_notebook_are_traced(tmp_path: Path) -> None:
    """The first with a fault; the same cell is run again, without it and with fewer steps."""
    client, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    imports, make, train, watch = CELLS
    wrong, right = train.format(steps=5, zero=""), train.format(steps=3, zero="optimizer.zero_grad(); ")
    cells = [imports, make, wrong, watch, right, watch]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    kernel = client.NotebookClient(book, timeout=100, resources={"metadata": {"path": str(tmp_path)}})
    kernel.create_kernel_manager()
    kernel.km.kernel_spec.argv[0] = sys.executable  # this Python, whatever kernels are installed
    kernel.execute()
    printed = ["".join(output.get("text", "") for output in book.cells[i].outputs) for i in (3, 5)]
    assert printed[0].startswith("5 optimizer steps on 1 process\n[not-zeroed] step 1")
    assert printed[1] == "3 optimizer steps on 1 process\nthe recording is complete\n"
