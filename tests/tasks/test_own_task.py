"""A task and a strategy of one's own, as docs/how-to/plug-ins has them, under every strategy; what only the end of a
run asks for is tried before its first step."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lockstep.config import plugins
from lockstep.config.run import Run, load
from lockstep.training.summary import digest_of
from support.contributed import example
from support.harness import TINY, run_on, works
from support.marks import long, slow

pytestmark = pytest.mark.processes


RATING = example("tasks/rating.py")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)  # which the ranks get, too
    draw = random.Random(0)
    for split, count in (("train", 60), ("validation", 9)):
        stars = [draw.randrange(5) for _ in range(count)]
        words = ["bad", "poor", "fair", "good", "great"]
        rows = [{"text": " ".join(draw.choices(words[s:], k=draw.randrange(2, 9))), "stars": s} for s in stars]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine_gossip.py").write_text(example("strategies/gossip.py"))
    return tmp_path


def job(here: Path, code: str, **values: Any) -> Run:
    """Each with a module of its own: they are imported once a process."""
    module = f"mine_rating_{abs(hash(code))}"
    (here / f"{module}.py").write_text(code)
    data = {"source": str(here), "max_length": 16}
    run = TINY | {"task": {"name": f"{module}.Rating"}, "data": data, "steps": 3, "output": str(here / "out")}
    config = TINY["model"]["config"] | {"use_cache": False}  # type: ignore[index]  # as Trainer always trains
    run |= {"model": {"type": "gpt2", "config": config}}
    return load(None, [], run | {"tokenizer": {"train": "wordlevel", "vocab_size": 50}} | values)


def weights_of(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.folder / "export/model.safetensors")


QUICK, NEXT = ("fsdp2", "pipeline", "zero3"), ("hf_trainer",)


@pytest.mark.parametrize(
    "name",
    [
        "mine_gossip.Gossip",
        *(n if n in QUICK else slow(n) if n in NEXT else long(n) for n in plugins.names("strategies")),
    ],
)
def test_the_task_of_contributing_under_every_strategy(name: str, here: Path) -> None:
    found = []
    for strategy in ("single", name):
        run = job(here, RATING, strategy={"name": strategy}, output=str(here / strategy))
        ranks = 1 if strategy == "single" else 2
        assert run_on(ranks, works, run, joined=False) == [0] * ranks
        found.append(weights_of(run))
        assert not list(run.folder.glob(".*"))  # nothing is left of what was tried
        assert json.loads((run.folder / "metrics.jsonl").read_text().splitlines()[0])["split"] == "train"
    assert found[0].keys() == found[1].keys()
    gives_bits = name.startswith("mine") or plugins.find("strategies", name).exact  # type: ignore[attr-defined]
    for key, tensor in found[0].items():
        if gives_bits:
            assert torch.equal(tensor, found[1][key]), key
        else:
            torch.testing.assert_close(
                found[1][key], tensor, atol=5e-3, rtol=0
            )  # AdamW's steps are as large as its rate


MISTAKES = {
    "an output without logits": ("        return models.sequence_classifier(", "        return _bare(", "logits"),
    "score counts wrong": ('"examples": real.sum().double()', '"examples": 2 * real.sum().double()', "were evaluated"),
    "metrics of a sum that is not there": ('float(sums["off"]) / count', 'float(sums["offf"]) / count', "offf"),
    "samples": ("    def metrics(", "    def samples(self, *_):\n        return 1 / 0\n\n    def metrics(", "by zero"),
    "an export": ("    def metrics(", "    def write(self, *_):\n        self.modell()\n\n    def metrics(", "modell"),
}  # fmt: skip
BARE = '''

def _bare(*arguments):
    """A model whose output is a tuple, which the loss below takes."""
    import torch
    from lockstep.tasks.models import models

    class Bare(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = models.sequence_classifier(*arguments)
            self.config = self.inner.config

        def forward(self, **inputs):
            return (self.inner(**inputs).logits,)

    return Bare()
'''


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_that_shows_at_the_end_costs_no_training(mistake: str, here: Path) -> None:
    old, new, said = MISTAKES[mistake]
    assert RATING.count(old) == 1
    code = RATING.replace(old, new)
    if new.endswith("_bare("):
        code = code.replace("outputs.logits", "outputs[0]") + BARE
    run = job(here, code, strategy={"name": "single"})
    with pytest.raises(AssertionError) as caught:
        run_on(1, works, run, joined=False)
    assert said in str(caught.value)
    assert "tried before training" in str(caught.value)
    assert not (run.folder / "metrics.jsonl").exists()
    assert not list(run.folder.glob(".*"))


def test_an_unknown_metric_is_refused_before_training(here: Path) -> None:
    run = job(here, RATING, strategy={"name": "single"}, evaluate={"every": 2}, checkpoint={"best": "bleu"})
    with pytest.raises(AssertionError, match="'bleu' is not a metric of this task"):
        run_on(1, works, run, joined=False)
    assert not (run.folder / "metrics.jsonl").exists()


def test_no_number_from_the_first_batch_on_names_micro_batches_and_rows(here: Path) -> None:
    code = RATING.replace('reduction="sum")  # IGNORED counts', 'reduction="sum") * float("nan")  # IGNORED counts')
    run = job(here, code, strategy={"name": "allreduce"})
    with pytest.raises(AssertionError) as caught:
        run_on(2, works, run, joined=False)
    said = str(caught.value)
    assert "TrainingFailed: before step 0, tried with the longest examples of the training split: the loss is" in said
    assert all(f"\n  micro-batch {micro_batch}: rows " in said for micro_batch in range(run.micro_batches))


def test_an_export_of_another_format_has_a_hash_of_its_weights(here: Path) -> None:
    code = RATING.replace(
        "    def metrics(",
        '    def write(self, folder, weights):\n        (folder / "config.json").write_text("{}")\n'
        '        __import__("torch").save(dict(weights), folder / "w.pt")\n\n    def metrics(',
    )
    digests = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run = job(here, code, strategy={"name": "single"}, output=str(here / name), seed=seed)
        assert run_on(1, works, run, joined=False) == [0]
        events = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
        digests.append(next(event["weights"] for event in events if event["event"] == "finish"))
    assert digests[0] == digests[1] != digests[2]
    assert digests[0] == digest_of(here / "a/export", torch.load(here / "a/export/w.pt"))
    assert not any(digest.startswith("e3b0c442") for digest in digests)
