"""Pairs of answers: the losses against their formulas, the reference against the model before training, and what a run
that is stopped, evaluated or given bad rows makes of them. That the bits do not depend on processes: test_tasks.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from safetensors.numpy import load_file, save_file

from lockstep.cli import main
from lockstep.config.plugins import find
from lockstep.config.run import Run, load
from lockstep.data.job import Job
from lockstep.data.prepare import warnings
from lockstep.distributed.world import World
from lockstep.tasks.task import make_task
from lockstep.tasks.text_task import TextData
from lockstep.training.evaluation import evaluate
from lockstep.training.predicting import predictions
from support.harness import build, tiny
from support.messages import mentions, raises
from support.task_runs import GPT2, TEMPLATE, make, write

pytestmark = pytest.mark.slow  # together a third of the time of tests without processes

ONE = ("launch.processes=1", "strategy.name=single", "micro_batches=2", "steps=4")
PAIR = {"prompt": "the dog", "chosen": "sees a cat", "rejected": "runs"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pairs")


def built(run: Run) -> tuple[Any, Any, World]:
    world = World(run)
    return *build(run, world), world


def said(model: Any, ids: list[int], first: int) -> torch.Tensor:
    """Log-probabilities of an answer's tokens, which begin at `first`, written out: float32."""
    logits = model(input_ids=torch.tensor([ids])).logits[0].float()
    return torch.stack([logits[i - 1].log_softmax(0)[ids[i]] for i in range(first, len(ids))])


def formula(options: Any, sums: list[torch.Tensor], counts: list[int], first: list[float]) -> torch.Tensor:
    """The loss of a pair as the papers have it; `first`: what the reference says."""
    beta = options.beta
    if options.loss == "ipo":
        (yw, yl), (rw, rl) = ([s / n for s, n in zip(x, counts, strict=True)] for x in (sums, first))
        return ((yw - rw) - (yl - rl) - 1 / (2 * beta)) ** 2
    if options.loss == "simpo":
        return -torch.log(torch.sigmoid(beta * sums[0] / counts[0] - beta * sums[1] / counts[1] - options.gamma))
    ratio = (sums[0] - first[0]) - (sums[1] - first[1])
    if options.loss == "hinge":
        return torch.clamp(1 - beta * ratio, min=0)
    smooth = options.label_smoothing
    return -(1 - smooth) * torch.log(torch.sigmoid(beta * ratio)) - smooth * torch.log(torch.sigmoid(-beta * ratio))


@pytest.mark.parametrize("keys", [["loss=dpo"], ["loss=dpo", "label_smoothing=0.2"], ["loss=ipo"], ["loss=hinge"],
                                  ["loss=simpo", "gamma=0.3"]], ids="_".join)  # fmt: skip
def test_losses_equal_those_of_the_papers(keys: list[str], folder: Path) -> None:
    """The model differs from its reference; the expected losses are computed answer by answer, without padding."""
    run = make(folder, "preference", *ONE, *(f"task.{key}" for key in keys), "task.beta=0.7")
    task, strategy, world = built(run)
    columns, rows = task.splits["train"], np.arange(7)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in strategy.model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=draw)
    model = strategy.model.eval()
    batch = task.collate(columns, rows, 0)
    found = task.loss_sum(SimpleNamespace(logits=model(**batch.inputs).logits), batch.targets)
    whole = torch.tensor(0.0)
    for row in rows:
        ids, targets = (columns.ragged(name).row(int(row)).tolist() for name in ("input_ids", "targets"))
        cut = int(columns.flat("chosen")[int(row)])
        both = [(ids[of], sum(t < 0 for t in targets[of])) for of in (slice(None, cut), slice(cut, None))]
        logs = [said(model, tokens, first) for tokens, first in both]
        reference = task.reference_outputs["train"][row].tolist() if task.reference_size else [0.0, 0.0]
        whole = whole + formula(task.options, [x.sum() for x in logs], [len(x) for x in logs], reference)
    torch.testing.assert_close(found, whole, rtol=2e-5, atol=1e-5)
    world.close()


def test_the_reference_is_the_model_before_training(folder: Path) -> None:
    run = make(folder, "preference", *ONE)
    task, strategy, world = built(run)
    columns, model = task.splits["validation"], strategy.model.eval()
    for row in (0, 5):
        ids, cut = columns.ragged("input_ids").row(row).tolist(), int(columns.flat("chosen")[row])
        targets = columns.ragged("targets").row(row).tolist()
        for place, of in enumerate((slice(None, cut), slice(cut, None))):
            wanted = said(model, ids[of], sum(t < 0 for t in targets[of])).sum()
            assert task.reference_outputs["validation"][row, place] == pytest.approx(float(wanted), rel=1e-5)
    scores = evaluate(world, task, strategy, columns)
    assert scores["loss"] == pytest.approx(np.log(2), rel=1e-6)
    assert scores["margin"] == pytest.approx(0, abs=1e-6)
    world.close()


def test_reference_batch_size_sets_the_batches_of_the_reference(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, sizes = find("tasks", "preference"), list[int]()
    scores = kind.reference_scores

    def counted(self: Any, forward: Any, batch: Any) -> torch.Tensor:
        sizes.append(len(batch.targets) // 2)
        return scores(self, forward, batch)

    monkeypatch.setattr(kind, "reference_scores", counted)
    outputs = {}
    for size in ("null", "5"):
        sizes.clear()
        task, _, world = built(make(folder, "preference", *ONE, f"task.reference_batch_size={size}"))
        world.close()
        rows = sum(len(task.splits[split]) for split in task.splits)
        assert sum(sizes) == rows
        assert max(sizes) == (5 if size == "5" else 44)  # else four micro-batches
        outputs[size] = task.reference_outputs
    for split, values in outputs["null"].items():
        np.testing.assert_allclose(outputs["5"][split], values, rtol=1e-5)
        assert np.abs(np.diff(values, axis=0)).min() > 1e-4  # so that a row in another's place would show


def test_a_blank_micro_batch_has_no_loss_and_a_finite_gradient(folder: Path) -> None:
    for kind in ("preference", "reward"):
        task, strategy, world = built(make(folder, kind, *ONE))
        blank = task.collate(task.splits["train"], np.zeros(0, dtype=np.int64), 0)
        for batch in (blank, task.collate(task.splits["train"], np.arange(3), 0).blank()):
            loss = task.loss_sum(strategy.model(**batch.inputs), batch.targets)
            loss.backward()
            assert float(loss.detach()) == 0
            assert int(task.targets_in_batch(batch.targets)) == 0
            assert all(p.grad is None or not p.grad.any() for p in strategy.model.parameters())
        world.close()


def trained(folder: Path, name: str, *overrides: str) -> tuple[int, Path]:
    run = make(folder, "preference", *ONE, "optim.learning_rate=1e-3", *overrides)
    (folder / f"{name}.yaml").write_text(run.model_copy(update={"output": str(folder / name)}).dump())
    return main(["train", str(folder / f"{name}.yaml")]), folder / name


def test_a_resumed_run_keeps_its_reference(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """From its file, and where that is gone or of other data, by asking the untrained model again."""
    status, whole = trained(folder, "whole")
    assert status == 0
    wanted = (whole / "export/model.safetensors").read_bytes()
    kept = load_file(whole / "reference.safetensors")
    assert {split: found.shape for split, found in kept.items()} == {"train": (90, 2), "validation": (15, 2)}
    assert trained(folder, "kept", "max_time=0.001s")[0] == 75
    for name in ("gone", "other"):
        shutil.copytree(folder / "kept", folder / name, symlinks=True)
    for name in ("kept", "gone", "other"):
        stopped = folder / name
        if name == "gone":
            (stopped / "reference.safetensors").unlink()
        if name == "other":
            save_file({split: 0 * found for split, found in kept.items()}, stopped / "reference.safetensors")
        assert trained(folder, name)[0] == 0
        assert (stopped / "export/model.safetensors").read_bytes() == wanted, name
    capfd.readouterr()
    assert main(["evaluate", str(whole)]) == 0
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["split"] == "validation"][-1]
    assert f"{last['loss']:,.6g}" in capfd.readouterr().out
    (whole / "reference.safetensors").unlink()
    assert main(["evaluate", str(whole)]) != 0
    assert mentions(capfd.readouterr().err, "LS5110", "reference.safetensors")
    assert main(["predict", str(whole), "the dog", "--json"]) == 0
    assert isinstance(json.loads(capfd.readouterr().out.splitlines()[-1])["written"], str)


def test_reward_model_ranks_answers(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = make(folder, "reward", *ONE, "steps=40", "optim.learning_rate=5e-3")
    (folder / "reward.yaml").write_text(run.model_copy(update={"output": str(folder / "reward-out")}).dump())
    assert main(["train", str(folder / "reward.yaml")]) == 0
    lines = [json.loads(line) for line in (folder / "reward-out/metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["accuracy"] > 0.9  # one says yes, the other no
    capfd.readouterr()
    assert main(["predict", str(folder / "reward-out"), "the dog\tsees yes", "the dog\tsees no", "--json"]) == 0
    better, worse = (json.loads(line)["reward"] for line in capfd.readouterr().out.splitlines()[-2:])
    assert better > worse
    _conversations_are_scored(folder / "reward-out")


def _conversations_are_scored(out: Path) -> None:
    """Conversations are scored with their last answer, by the template used in training; equal texts have equal
    rewards."""
    first, last = {"role": "user", "content": "the dog"}, {"role": "assistant", "content": "sees yes"}
    forms: list[Any] = [
        {"prompt": "the dog", "answer": "sees yes"},
        {"prompt": [first], "answer": [last]},
        {"prompt": "the dog", "answer": [last]},
        {"messages": [first, last]},
        [first, last],
    ]
    keys = {"task.conversations": True, "task.chat_template": TEMPLATE}
    rows = list(predictions(out, forms, keys))
    assert {row["reward"] for row in rows} == {rows[0]["reward"]}
    assert rows[-1]["messages"] == [first, last]
    (other,) = predictions(out, [[first, last | {"content": "sees no"}]], keys)
    assert other["reward"] != rows[0]["reward"]
    with raises("LS2407", "text 1", "user"):
        list(predictions(out, [[first, last, first]], keys))
    with raises("LS2408", "text 1", "no chat template"):  # trained on texts
        list(predictions(out, [[first, last]], {}))


# -- rows ------------------------------------------------------------------------------------------------------------


def prepared(folder: Path, rows: list[dict], *overrides: str) -> Any:
    write(folder / "rows.jsonl", rows)
    data = {"train": str(folder / "rows.jsonl"), "validation": str(folder / "rows.jsonl"), "max_length": 32}
    values = {"task": {"name": "preference"}, "model": GPT2, "tokenizer": {"train": "bpe", "vocab_size": 300}}
    run = tiny(*overrides, **values, data=data, output=str(folder / "out"))
    return make_task(Job.of(run).with_data())


SPOKEN = {
    "chosen": [{"role": "user", "content": "the dog"}, {"role": "assistant", "content": "sees a cat"}],
    "rejected": [{"role": "user", "content": "the dog"}, {"role": "assistant", "content": "runs"}],
}
CHAT = ["task.conversations=true", f"task.chat_template={json.dumps(TEMPLATE)}"]


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        (SPOKEN, [*CHAT, "task.prompt=null"]),
        (PAIR, CHAT),
        ({**{k: v[1:] for k, v in SPOKEN.items()}, "prompt": SPOKEN["chosen"][:1]}, CHAT),
    ],
    ids=["whole", "texts", "lists"],
)
def test_conversations_in_every_shape_are_the_same_tokens(row: dict, keys: list[str], tmp_path: Path) -> None:
    task = prepared(tmp_path, [row] * 4, *keys)
    columns = task.splits["train"]
    ids, cut = columns.ragged("input_ids").row(0).tolist(), int(columns.flat("chosen")[0])
    assert (
        task.tokenizer.decode(ids[:cut], skip_special_tokens=True).lstrip()
        == "<user> the dog\n<assistant> sees a cat\n"
    )
    targets = [t for t in columns.ragged("targets").row(0).tolist()[:cut] if t >= 0]
    assert task.tokenizer.decode(targets, skip_special_tokens=True).lstrip() == "sees a cat\n"


def test_truncated_pairs_are_counted(tmp_path: Path) -> None:
    task = prepared(tmp_path, [PAIR, PAIR | {"chosen": "sees a cat " * 30}])
    notes = warnings(task.prepared.facts)
    assert [text for text in notes if "1 of 2 train pairs" in text and "data.max_length" in text]
    assert not task.warnings  # nothing by which processes could differ


NAMED = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m.name is defined %}{{ m.name }}{% endif %} {{ m['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)


def test_further_keys_of_messages_reach_the_template(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": "the dog", "name": name}], "chosen": "sees a cat", "rejected": "runs"}
        for name in ("ann", None)
    ]
    keys = ["task.conversations=true", f"task.chat_template={json.dumps(NAMED)}"]
    task = prepared(tmp_path, rows * 2, *keys)
    columns = task.splits["train"]
    for number, row in enumerate(rows):
        prompt = {key: value for key, value in row["prompt"][0].items() if value is not None}
        messages = [prompt, {"role": "assistant", "content": row["chosen"]}]
        whole = task.tokenizer.apply_chat_template(messages, chat_template=NAMED, tokenize=False)
        ids, cut = columns.ragged("input_ids").row(number), int(columns.flat("chosen")[number])
        assert task.tokenizer.decode(ids[:cut], skip_special_tokens=True).lstrip() == whole
    data = TextData("", {})
    parts = [task.key_parts(data, task.tokenizer, Dataset.from_list([each])) for each in (rows[0], SPOKEN | PAIR)]
    assert [{"prompt": ["name"]} in each for each in parts] == [True, False]


WORDS = ["tokenizer.train=wordlevel"]  # makes nothing of blanks


@pytest.mark.parametrize(
    ("row", "keys", "said"),
    [
        (PAIR | {"rejected": "sees a cat"}, [], ("LS3003", "row 1")),
        (PAIR | {"prompt": "the dog " * 40}, [], ("LS3005", "row 1", "32")),
        (PAIR | {"rejected": "  "}, [], ("LS2323", "task.rejected", "1")),
        (PAIR | {"chosen": "x y " * 40 + "a", "rejected": "x y " * 40 + "b"}, [], ("LS3004", "row 1")),
        (PAIR | {"chosen": "the dog ", "rejected": "the dog"}, WORDS, ("LS3424", "row 1", "'the dog '", "'the dog'")),
        (PAIR, ["task.rejected=worse"], ("LS2312", "task.rejected", "'worse'")),
        (PAIR, ["task.conversations=true"], ("LS3351", "task.conversations")),
        (PAIR, ["task.chat_template=x"], ("LS3000",)),
        (PAIR, ["task.loss=ipo", "task.label_smoothing=0.1"], ("LS3330",)),
        (PAIR, ["task.gamma=1"], ("LS3332",)),
    ],
)
def test_rows_that_cannot_be_learned_from(row: dict, keys: list[str], said: tuple[str, ...], tmp_path: Path) -> None:
    with raises(*said):
        prepared(tmp_path, [PAIR, row], *keys)


@pytest.mark.parametrize(
    ("row", "keys", "code"),
    [
        (PAIR | {"rejected": PAIR["chosen"]}, [], "LS3003"),
        (PAIR | {"prompt": "the dog " * 40}, [], "LS3005"),
        (PAIR | {"chosen": "x y " * 40 + "a", "rejected": "x y " * 40 + "b"}, [], "LS3004"),
        (PAIR | {"chosen": "the dog ", "rejected": "the dog"}, WORDS, "LS3424"),
    ],
)
def test_the_first_such_rows_are_named_and_all_counted(row: dict, keys: list[str], code: str, tmp_path: Path) -> None:
    with raises(code, "row 1 of ", "(and 5 more of rows 0 to 6: 2, 3, 4, ...)"):
        prepared(tmp_path, [PAIR, *[row] * 6], *keys)


def test_lists_need_to_be_called_conversations(tmp_path: Path) -> None:
    with raises("LS3002"):
        prepared(tmp_path, [SPOKEN, SPOKEN], "task.prompt=null")
    bad = {**SPOKEN, "rejected": [{"role": "user"}]}
    with raises("LS3001", "task.rejected", "row 1"):
        prepared(tmp_path, [SPOKEN, bad], "task.prompt=null", *CHAT)


@pytest.mark.processes
def test_init_recognizes_pairs_of_answers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "pairs.jsonl", [PAIR | {"prompt": f"the dog {n}"} for n in range(40)])
    file = tmp_path / "run.yaml"
    assert main(["init", str(file), "--data", str(tmp_path / "pairs.jsonl"), "--yes"]) == 0, capfd.readouterr()
    run = load(file, [])
    assert (run.task.name, run.task.options["prompt"]) == ("preference", "prompt")
