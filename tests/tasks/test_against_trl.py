"""Pairs of answers beside TRL's trainers: the same rows make the same tokens, and the same weights the same loss,
rewards and gradients, to float32's rounding. A control has another beta. The plain reference is held to them, too."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.distributed.world import World
from lockstep.plain import losses
from lockstep.plain.examples import Plain
from lockstep.plain.losses import batch_loss
from lockstep.plain.scores import scores
from lockstep.proof import against_plain
from lockstep.tasks.preference import Preference
from lockstep.tasks.reward import Reward
from lockstep.training.plain_sides import with_defaults
from support.harness import build
from support.task_runs import make, sentence, write

pytestmark = pytest.mark.extras

ROWS = 9
ONE = ("launch.processes=1", "strategy.name=single", "micro_batches=2", "steps=4")
QUIET = {
    "use_cpu": True,
    "report_to": [],
    "per_device_train_batch_size": ROWS,
    "bf16": False,
    "disable_tqdm": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers begin with a space, as TRL reads prompt and answer as one text."""
    folder, draw = tmp_path_factory.mktemp("trl"), random.Random(3)
    for kind in ("preference", "reward"):
        (folder / kind).mkdir()
        for split in ("train", "validation"):
            rows = [{"prompt": sentence(draw), "chosen": f" {sentence(draw)}", "rejected": f" {sentence(draw)} no"}
                    for _ in range(3 * ROWS)]  # fmt: skip
            write(folder / kind / f"{split}.jsonl", rows)
    return folder


def moved(model: Any) -> Any:
    """A copy of the model, some way from its reference, without dropout."""
    copied, draw = copy.deepcopy(model).eval(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=draw)
    return copied


def plain(tokenizer: Any) -> Any:
    """One that adds no end token by itself, as GPT-2's: TRL would add a second. And no begin token, which CPO adds."""
    from tokenizers.processors import Sequence

    copied = copy.deepcopy(tokenizer)
    copied.backend_tokenizer.post_processor, copied.bos_token = Sequence([]), None
    return copied


def rows_of(folder: Path, kind: str) -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.load_dataset("json", data_files=str(folder / kind / "train.jsonl"), split=f"train[:{ROWS}]")


def ours(folder: Path, kind: str, *keys: str) -> tuple[Any, Any, Any]:
    """The task, its model and the micro-batch of the first rows."""
    run = make(folder, kind, *ONE, *keys)
    world = World(run)
    task, strategy = build(run, world)
    world.close()
    return task, strategy.model, task.collate(task.splits["train"], np.arange(ROWS), 0)


def judged(task: Any, model: Any, batch: Any) -> tuple[float, dict[str, torch.Tensor], dict[str, float]]:
    """Mean loss, its gradients by name, and the metrics of an evaluation."""
    model.zero_grad()
    loss = task.loss_sum(SimpleNamespace(logits=model(**batch.inputs).logits), batch.targets) / ROWS
    loss.backward()
    with torch.no_grad():
        sums = task.score(lambda inputs: model(**inputs).logits, batch)
    return float(loss.detach()), gradients(model), task.metrics(sums)


def by_plain(
    task: Any, model: Any, folder: Path, reference: Any = None, libraries: bool = False, scored: bool = False
) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean loss and its gradients by `lockstep.plain`, from the raw rows on. `libraries`: by TRL's own functions;
    `scored`: that of an evaluation, without them."""
    rows = [dict(row) for row in rows_of(folder, task.run.task.name)]
    job = Plain(with_defaults(task), task.prepared.tokenizer, {"train": rows})
    job.reference, job.libraries = reference, libraries
    if scored:
        return scores(job, model, job.encode(rows))["loss"], {}
    model.zero_grad()
    total, count = batch_loss(job, model, job.encode(rows))
    (total / count).backward()
    return float(total.detach()) / count, gradients(model)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.to_dense().clone() for name, p in model.named_parameters() if p.grad is not None}


def close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    """Whether no parameter's gradient is another by more than 1e-5 of the length of the whole gradient. Not of its own:
    what the two answers of a pair give nearly cancels out in some, and in the bias of keys all of it does."""
    assert found.keys() == wanted.keys()
    whole = torch.stack([each.norm() for each in wanted.values()]).norm()
    return all(bool((found[name] - wanted[name]).norm() <= 1e-5 * whole) for name in wanted)


def tokens_of(batch: Any) -> list[list[int]]:
    inputs = batch.inputs
    return [i[m.bool()].tolist() for i, m in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]


def by_turns(inputs: dict[str, torch.Tensor]) -> list[list[int]]:
    """TRL has all chosen answers and then all rejected ones; a task has the two of a pair next to each other."""
    kept = [ids[mask.bool()].tolist() for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
    half = len(kept) // 2
    return [each for pair in zip(kept[:half], kept[half:], strict=True) for each in pair]


def told(metrics: dict[str, list[float]], *names: str) -> list[float]:
    return [metrics[name][-1] for name in names]


@pytest.mark.parametrize("loss", ["dpo", "ipo", "hinge"])
def test_preferences_equal_those_of_the_dpo_trainer(loss: str, folder: Path) -> None:
    trl = pytest.importorskip("trl")
    task, reference, batch = ours(folder, "preference", f"task.loss={loss}", "task.beta=0.7")
    model = moved(reference)
    kind = {"dpo": "sigmoid"}.get(loss, loss)
    config = trl.DPOConfig(str(folder / "out"), beta=0.7, loss_type=[kind], max_length=32, **QUIET)
    theirs = copy.deepcopy(model)
    trainer = trl.DPOTrainer(
        theirs, copy.deepcopy(reference).eval(), config,
        train_dataset=rows_of(folder, "preference"), processing_class=plain(task.tokenizer),
    )  # fmt: skip
    inputs = trainer.data_collator([trainer.train_dataset[i] for i in range(ROWS)])
    assert by_turns(inputs) == tokens_of(batch)
    theirs.eval()
    wanted = trainer.compute_loss(theirs, inputs)
    wanted.backward()
    found, slopes, metrics = judged(task, model, batch)
    assert found == pytest.approx(float(wanted.detach()), rel=2e-6)
    assert metrics["loss"] == pytest.approx(float(wanted.detach()), rel=2e-6)
    assert close(slopes, gradients(theirs))
    loss_by_plain, slopes_by_plain = by_plain(task, model, folder, reference.eval())
    assert loss_by_plain == pytest.approx(float(wanted.detach()), rel=2e-6)
    assert close(slopes_by_plain, gradients(theirs))
    names = ("rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected")
    if loss != "ipo":  # whose rewards here are of a token, as its loss is; TRL's are of the whole answer
        rewards = [metrics[n] for n in ("accuracy", "margin", "reward_chosen", "reward_rejected")]
        assert rewards == pytest.approx(told(trainer._metrics["eval"], *names), rel=1e-5, abs=1e-6)
    other, _, other_batch = ours(folder, "preference", f"task.loss={loss}", "task.beta=0.6")
    different, apart, _ = judged(other, model, other_batch)
    assert different != pytest.approx(float(wanted.detach()), rel=1e-3)
    assert not close(apart, gradients(theirs))


def test_smoothed_preferences_equal_those_of_the_dpo_trainer(folder: Path) -> None:
    """TRL smooths the labels of `aot`, which sorts the pairs of a batch and is DPO's loss where there is one."""
    trl = pytest.importorskip("trl")
    task, reference, batch = ours(folder, "preference", "task.label_smoothing=0.2", "task.beta=0.7")
    model = moved(reference)
    keys = {"beta": 0.7, "loss_type": ["aot"], "label_smoothing": 0.2, "max_length": 32}
    theirs = copy.deepcopy(model)
    trainer = trl.DPOTrainer(
        theirs, copy.deepcopy(reference).eval(), trl.DPOConfig(str(folder / "out"), **keys, **QUIET),
        train_dataset=rows_of(folder, "preference"), processing_class=plain(task.tokenizer),
    )  # fmt: skip
    theirs.eval()
    pairs = [trainer.data_collator([trainer.train_dataset[i]]) for i in range(ROWS)]
    wanted = sum(trainer.compute_loss(theirs, pair) for pair in pairs) / ROWS
    wanted.backward()
    found, slopes, metrics = judged(task, model, batch)
    loss_by_plain, slopes_by_plain = by_plain(task, model, folder, reference.eval())
    scored = metrics["loss"], by_plain(task, model, folder, reference, scored=True)[0]
    assert (found, loss_by_plain, *scored) == (pytest.approx(float(wanted.detach()), rel=2e-6),) * 4
    assert close(slopes, gradients(theirs))
    assert close(slopes_by_plain, gradients(theirs))
    other, _, other_batch = ours(folder, "preference", "task.label_smoothing=0.1", "task.beta=0.7")
    assert judged(other, model, other_batch)[0] != pytest.approx(float(wanted.detach()), rel=1e-3)


def test_simpo_equals_that_of_the_cpo_trainer(folder: Path) -> None:
    cpo = pytest.importorskip("trl.experimental.cpo")
    task, model, batch = ours(folder, "preference", "task.loss=simpo", "task.beta=2", "task.gamma=0.7")
    model = moved(model)
    theirs = copy.deepcopy(model)
    config = cpo.CPOConfig(
        str(folder / "out"), beta=2.0, loss_type="simpo", simpo_gamma=0.7, cpo_alpha=0.0, max_length=32, **QUIET
    )
    trainer = cpo.CPOTrainer(
        theirs, config, train_dataset=rows_of(folder, "preference"), processing_class=plain(task.tokenizer)
    )
    inputs = trainer.data_collator([trainer.train_dataset[i] for i in range(ROWS)])
    theirs.eval()
    wanted, said = trainer.get_batch_loss_metrics(theirs, inputs, "eval")
    wanted.backward()
    found, slopes, metrics = judged(task, model, batch)
    assert found == pytest.approx(float(wanted.detach()), rel=2e-6)
    assert close(slopes, gradients(theirs))
    loss_by_plain, slopes_by_plain = by_plain(task, model, folder)
    assert loss_by_plain == pytest.approx(float(wanted.detach()), rel=2e-6)
    assert close(slopes_by_plain, gradients(theirs))
    rewards = [metrics[n] for n in ("accuracy", "margin", "reward_chosen", "reward_rejected")]
    names = ("accuracies", "margins", "chosen", "rejected")
    assert rewards == pytest.approx([said[f"eval_rewards/{n}"] for n in names], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("center", [0.0, 0.01])
def test_rewards_equal_those_of_the_reward_trainer(center: float, folder: Path) -> None:
    trl = pytest.importorskip("trl")
    task, model, batch = ours(folder, "reward", f"task.center={center}")
    model = moved(model)
    theirs = copy.deepcopy(model)
    config = trl.RewardConfig(str(folder / "out"), center_rewards_coefficient=center or None, max_length=32, **QUIET)
    # which tokens it makes of a text of BERT's is not asked: it wants an end token, and BERT has none
    pairs = tokens_of(batch)
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"chosen_ids": pairs[::2], "rejected_ids": pairs[1::2]})
    trainer = trl.RewardTrainer(theirs, config, train_dataset=rows, processing_class=task.tokenizer)
    inputs = trainer.data_collator([trainer.train_dataset[i] for i in range(ROWS)])
    assert by_turns(inputs) == pairs
    theirs.eval()
    wanted = trainer.compute_loss(theirs, inputs)
    wanted.backward()
    found, slopes, metrics = judged(task, model, batch)
    assert found == pytest.approx(float(wanted.detach()), rel=2e-6)
    assert close(slopes, gradients(theirs))
    loss_by_plain, slopes_by_plain = by_plain(task, model, folder)
    assert loss_by_plain == pytest.approx(float(wanted.detach()), rel=2e-6)
    assert close(slopes_by_plain, gradients(theirs))
    rewards = [metrics[n] for n in ("accuracy", "margin", "reward")]
    assert rewards == pytest.approx(told(trainer._metrics["eval"], "accuracy", "margin", "mean_reward"), abs=1e-6)


PREFERENCES = {
    "dpo": (),
    "smoothed dpo": ("task.label_smoothing=0.2",),
    "ipo": ("task.loss=ipo",),
    "hinge": ("task.loss=hinge",),
    "simpo": ("task.loss=simpo", "task.gamma=0.7"),
}
LOSSES = {name: ("preference", ("task.beta=0.7", *keys)) for name, keys in PREFERENCES.items()}
LOSSES |= {"reward": ("reward", ()), "centered reward": ("reward", ("task.center=0.01",))}


def counted(monkeypatch: pytest.MonkeyPatch, factor: float = 1.0) -> list[str]:
    """The calls of TRL's losses from now on, whose results are multiplied by a factor."""
    trl, cpo = pytest.importorskip("trl"), pytest.importorskip("trl.experimental.cpo")
    calls = list[str]()

    def record(trainer: Any, name: str) -> None:
        method: Callable[..., Any] = getattr(trainer, name)

        def called(*a: Any, **k: Any) -> Any:
            calls.append(f"{trainer.__name__}.{name}")
            result = method(*a, **k)
            return (result[0] * factor, *result[1:]) if isinstance(result, tuple) else result * factor

        monkeypatch.setattr(trainer, name, called)

    record(trl.DPOTrainer, "compute_loss")
    record(cpo.CPOTrainer, "cpo_loss")
    record(trl.RewardTrainer, "compute_loss")
    return calls


@pytest.mark.parametrize("name", LOSSES)
def test_plain_calls_the_losses_of_trl(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's losses equal those that plain writes out, and a fault in TRL's shows in plain's result."""
    kind, keys = LOSSES[name]
    task, reference, _ = ours(folder, kind, *keys)
    model = moved(reference)
    written, slopes = by_plain(task, model, folder, reference.eval())
    calls = counted(monkeypatch)
    assert (by_plain(task, model, folder, reference)[0], calls) == (written, [])
    called, slopes_by_trl = by_plain(task, model, folder, reference, libraries=True)
    trainer = "RewardTrainer" if kind == "reward" else "CPOTrainer" if name == "simpo" else "DPOTrainer"
    assert {call.partition(".")[0] for call in calls} == {trainer}
    assert called == pytest.approx(written, rel=2e-6)
    assert close(slopes_by_trl, slopes)
    counted(monkeypatch, 1.01)
    assert by_plain(task, model, folder, reference, libraries=True)[0] == pytest.approx(1.01 * written, rel=2e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_a_fault_of_a_loss_is_found_by_trl(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's losses find a fault without the formulas that plain writes out."""
    kind, keys = LOSSES[name]
    run = make(tmp_path, kind, *ONE, *keys)
    task: Any = {"preference": Preference, "reward": Reward}[kind]
    monkeypatch.setattr(losses, "logsigmoid", None)
    calls = counted(monkeypatch)
    found = against_plain.train_beside_plain(run)
    assert (found.differences, found.uncovered, len(found.steps), bool(calls)) == ([], None, 2, True)
    judged: Callable[..., Any] = task._judged
    wrong = lambda scores: scores | {"loss": 1.001 * scores["loss"]}  # noqa: E731
    monkeypatch.setattr(task, "_judged", lambda self, *a: wrong(judged(self, *a)))
    assert against_plain.train_beside_plain(run).differences
