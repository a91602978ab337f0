"""`lockstep.plain` imports nothing of lockstep and is short; it reproduces the steps of every task."""

from __future__ import annotations

import ast
import csv
import json
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

import lockstep.plain
from lockstep.config import plugins
from lockstep.config.run import Run
from lockstep.data.batch import StepBatch
from lockstep.data.job import Job
from lockstep.distributed.world import World
from lockstep.plain import rows
from lockstep.plain.losses import batch_loss
from lockstep.proof import against_plain, recording
from lockstep.strategies.single import ReplicatedStrategy
from lockstep.strategies.strategy import StepResult
from lockstep.tasks.classification import Classification
from lockstep.tasks.embedding import Embedding
from lockstep.tasks.language_modeling import LanguageModeling
from lockstep.tasks.models import model_configs
from lockstep.tasks.modules.wrapped_module import Calling
from lockstep.tasks.objectives.one_label import OneLabel
from lockstep.tasks.per_token import PerToken
from lockstep.tasks.preference import Preference
from lockstep.tasks.question_answering import QuestionAnswering
from lockstep.tasks.reward import Reward
from lockstep.tasks.task import Task
from lockstep.tasks.token_classification import TokenClassification
from lockstep.tasks.translation import Translation
from lockstep.track.console import Console
from lockstep.training.resolve import for_rank
from support.harness import run_on, tiny
from support.marks import long, slow
from support.own_modules import MEAN, NET, NET_FUNCTIONS, job
from support.stream_runs import LM, shards, streamed
from support.task_runs import MARIAN, TASKS, make, sentence, write

pytestmark = pytest.mark.slow  # together a third of the time of tests without processes

FILES = sorted(Path(lockstep.plain.__file__).parent.glob("**/*.py"))
ALLOWED = {"torch", "transformers", "peft", "numpy", "pyarrow", "datasets", "trl", "sentence_transformers", "sacrebleu"}
ALLOWED |= {"PIL", "sklearn", "scipy", "seqeval", "rouge_score", "torchmetrics", "huggingface_hub"}
OTHERS: dict[str, tuple[str, ...]] = {  # every strategy but single and ddp, and the engines behind `hf_accelerate`
    **dict.fromkeys(("allreduce", "fsdp2", "zero1", "zero2", "zero3", "pipeline", "hf_accelerate", "hf_trainer"), ()),
    "hf_accelerate fsdp": ("strategy.options={fsdp: {}}",),
    "hf_accelerate zero3": ("strategy.options={deepspeed: {zero_stage: 3}}",),
}
BY_HAND = ("allreduce", "zero1", "zero2", "hf_accelerate", "hf_accelerate fsdp", "hf_accelerate zero3")
QUICK, LONG = ("classification", "prompts", "pairs"), ("documents", "packed", "reward")  # the others are slow


def imports(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def test_plain_reference_imports_nothing_of_lockstep() -> None:
    assert FILES
    for file in FILES:
        for name in imports(file):
            root = name.partition(".")[0]
            own = name.startswith("lockstep.plain")
            assert own or root in ALLOWED or root in sys.stdlib_module_names, f"{file.name} imports {name}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plain")


KINDS = (*TASKS, "classification")


def run_of(kind: str, folder: Path, *keys: str) -> Run:
    """Return a run with padding, so that missing masks show."""
    keys = ("data.padding=batch", "task.samples=0", *keys)
    keys = tuple(key for key in keys if kind not in ("preference", "reward") or key != "task.samples=0")
    return tiny(*keys, output=str(folder / "out")) if kind == "classification" else make(folder, kind, *keys)


@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else long(kind) if kind in LONG else slow(kind) for kind in KINDS]
)
def test_a_task_is_as_plain_computes_it_and_a_fault_is_found(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(kind, folder)
    found = against_plain.train_beside_plain(run)
    assert (found.differences, found.uncovered, len(found.steps)) == ([], None, 2)
    FAULTS[kind](monkeypatch)
    assert against_plain.train_beside_plain(run).differences


def test_a_frozen_weight_that_decays_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of("classification", folder, "model.freeze=[transformer.wte.*]")
    found = against_plain.train_beside_plain(run)
    assert (found.differences, found.uncovered, len(found.steps)) == ([], None, 2)
    whole = ReplicatedStrategy.train_step

    def decaying(strategy: ReplicatedStrategy, batch: StepBatch, rate: float) -> StepResult:
        (frozen,) = (p for n, p in strategy.model.named_parameters() if n.endswith("wte.weight"))
        with torch.no_grad():
            frozen.mul_(1 - 0.1 * rate)
        return whole(strategy, batch, rate)

    monkeypatch.setattr(ReplicatedStrategy, "train_step", decaying)
    assert any("wte.weight changes" in line for line in against_plain.train_beside_plain(run).differences)


def test_an_fsmt_learns_its_targets_from_their_end_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given labels alone, transformers feeds the source to the decoder of an FSMT."""
    entries = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "encoder_layers": 1, "decoder_layers": 1}
    entries |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    run = run_of("translation", folder, f"model={json.dumps({'type': 'fsmt', 'config': entries})}")
    found = against_plain.train_beside_plain(run)
    assert (found.differences, found.uncovered, len(found.steps)) == ([], None, 2)
    monkeypatch.setattr(model_configs, "FROM_END_TOKEN", ())
    assert against_plain.train_beside_plain(run).differences


def test_a_decoder_alone_has_a_logit_for_each_token(folder: Path) -> None:
    """Marian configures its decoder's vocabulary in a separate entry, whose default is 58,101."""
    run = run_of("prompts", folder, f"model={json.dumps(MARIAN)}")
    found = against_plain.train_beside_plain(run)
    assert (found.differences, found.uncovered, len(found.steps)) == ([], None, 2)


def verified(run: Run, ranks: int) -> tuple[int, dict[str, Any]]:
    """Return exit status and verdict of `verify` on a job of so many processes."""
    assert run_on(ranks, recorded, run, joined=False) == [0] * ranks
    verdict = run.folder / "verdict.json"
    status = against_plain.tell(Console(False), Job.of(run), run.folder, verdict)
    return status, json.loads(verdict.read_text())["plain"]


def recorded(world: World, run: Run) -> int:
    return recording.record(for_rank(run, world), world, "2", "0", "2")


@pytest.mark.processes
@pytest.mark.parametrize(
    "strategy",
    ["ddp", *(long(s) if s in BY_HAND else slow(s) for s in OTHERS)],
)
def test_ranks_train_what_plain_computes(strategy: str, tmp_path: Path) -> None:
    """The steps have dropout, and plain starts from the run's optimizer state."""
    run = tiny(f"strategy.name={strategy.split()[0]}", *OTHERS.get(strategy, ()), output=str(tmp_path))
    assert verified(run, 2) == (0, {"differences": [], "not_covered": None})


def test_plain_comparison_covers_every_strategy() -> None:
    assert {"single", "ddp", *(name.split()[0] for name in OTHERS)} == {*plugins.names("strategies")}


@pytest.mark.processes
@pytest.mark.parametrize(("bug", "said"), [("CountedTwice", "gradient norm"), ("OwnRate", "change of")])
def test_a_mistake_across_ranks_is_found_by_plain(bug: str, said: str, tmp_path: Path) -> None:
    status, told = verified(tiny(f"strategy.name=support.buggy.{bug}", output=str(tmp_path)), 2)
    assert status == 1
    assert any(said in line for line in told["differences"])


@pytest.mark.processes
@pytest.mark.slow
def test_the_reference_of_preferences_is_the_model_before_any_training(tmp_path: Path) -> None:
    run = make(tmp_path, "preference", "strategy.name=ddp")
    assert verified(run, 2) == (0, {"differences": [], "not_covered": None})


def test_an_evaluation_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    score: Callable[..., Any] = OneLabel.score
    more = lambda sums: {**sums, "loss": sums["loss"] * 1.001}  # noqa: E731
    monkeypatch.setattr(OneLabel, "score", lambda self, *a: more(score(self, *a)))
    found = against_plain.train_beside_plain(tiny(output=str(tmp_path)))
    assert [line.partition(" of ")[0] for line in found.differences] == ["evaluation: loss"]
    assert "loss" in found.scores


def worse(name: str, by: float) -> Callable[[pytest.MonkeyPatch, type[Task]], None]:
    """Return a score that is slightly wrong."""

    def plant(patch: pytest.MonkeyPatch, task: type[Task]) -> None:
        metrics: Callable[..., Any] = task.metrics
        wrong = lambda scores: scores | {name: scores[name] + by}  # noqa: E731
        patch.setattr(task, "metrics", lambda self, *a: wrong(metrics(self, *a)))

    return plant


SCORED = {
    "classification": (Classification, {"accuracy", "loss", "macro_f1"}),
    "packed": (LanguageModeling, {"accuracy", "loss", "perplexity"}),
    "translation": (Translation, {"accuracy", "bleu", "chrf", "loss", "perplexity"}),
    "token_classification": (TokenClassification, {"accuracy", "f1", "loss", "precision", "recall"}),
    "questions": (QuestionAnswering, {"exact_match", "f1", "loss"}),
    "pairs": (Embedding, {"loss", "triplet_accuracy"}),
    "reward": (Reward, {"accuracy", "loss", "margin", "reward"}),
}


LIBRARIES = {
    "classification": "sklearn",
    "token_classification": "seqeval",
    "questions": "torchmetrics",
}  # of the extra `compared`


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.extras] * (k in LIBRARIES)) for k in SCORED])
def test_scores_equal_those_of_the_fields_libraries(
    kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The libraries are scikit-learn, seqeval, sacrebleu and SQuAD's script, applied to outputs of the plain path."""
    if kind in LIBRARIES:
        pytest.importorskip(LIBRARIES[kind], reason="needs the extra compared")
    task, names = SCORED[kind]
    run = run_of(kind, folder)
    found = against_plain.train_beside_plain(run, 1)
    assert (found.differences, {*found.scores}) == ([], names)
    wrong = next(iter(sorted(names - {"loss"}, reverse=True)))
    worse(wrong, 0.02)(monkeypatch, task)
    assert [line.partition(" of ")[0] for line in against_plain.train_beside_plain(run, 1).differences] == [
        f"evaluation: {wrong}"
    ]


DATA = {
    "cut": {},
    "filtered": {"filter": {"lang": "en", "text": {"min_words": 2}}, "test_fraction": 0.1},
    "each once": {"deduplicate": True, "decontaminate": True, "validation_fraction": 0.3},
    "split column": {"split_column": "split", "limit": 90, "group_by_length": 2},
    "csv": {"source": "rows.csv"},
}


@pytest.mark.parametrize(
    "keys", [pytest.param(d, id=k, marks=[pytest.mark.slow] * (k != "each once")) for k, d in DATA.items()]
)
def test_the_same_rows_are_read(keys: dict[str, Any], tmp_path: Path) -> None:
    """Rows without a text, duplicates, and rows of another language or split are dropped as by the run."""
    draw = random.Random(7)
    rows = [{"text": sentence(draw) if i % 17 else " ", "lang": "de" if i % 5 == 0 else "en"} for i in range(120)]
    rows = [
        row | {"label": len(row["text"]) % 3, "split": "dev" if i % 7 == 0 else "train"} for i, row in enumerate(rows)
    ]
    rows += rows[:10]
    write(tmp_path / "rows.jsonl", rows)
    with open(tmp_path / "rows.csv", "w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, [*rows[0]])
        table.writeheader()
        table.writerows(rows)
    keys = {"source": "rows.jsonl", "max_length": 32, "drop_missing": True, **keys}
    run = tiny(data=keys | {"source": str(tmp_path / keys["source"])}, output=str(tmp_path / "out"))
    found = against_plain.train_beside_plain(run)
    assert (found.differences, found.uncovered, len(found.steps)) == ([], None, 2)


def test_labels_of_dropped_rows_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only row with a label is dropped from train because validation has it too; the model still has a logit for
    the label."""
    draw = random.Random(7)
    texts = [sentence(draw) for _ in range(40)]
    train = [{"text": text, "label": 3 if text == texts[0] else at % 3} for at, text in enumerate(texts)]
    write(tmp_path / "train.jsonl", train)
    write(tmp_path / "validation.jsonl", [row | {"label": 0} for row in train[:8]])
    data = {"source": str(tmp_path), "max_length": 32, "decontaminate": True}
    run = tiny(data=data, output=str(tmp_path / "out"))
    found = against_plain.train_beside_plain(run)
    assert (found.differences, found.uncovered, len(found.steps)) == ([], None, 2)
    monkeypatch.setattr("lockstep.plain.examples.UNFILTERED_TRAIN", "")
    with pytest.raises(RuntimeError, match="size of tensor"):
        against_plain.train_beside_plain(run)


def mixture(folder: Path, task: str) -> Run:
    """Return two sources, one of which has another name for the text column."""
    draw = random.Random(3)
    texts = [sentence(draw) for _ in range(70)]
    rows = [{"text": text, "label": ("joy", "fear")[len(text) % 2], "lang": "en"} for text in texts]
    write(folder / "a.jsonl", rows[:40])
    others = [
        {"said": row["text"], "label": row["label"], "lang": "de" if i % 4 else "en"} for i, row in enumerate(rows)
    ]
    write(folder / "b.jsonl", others)
    sources = [
        {"source": str(folder / "a.jsonl"), "weight": 2},
        {"source": str(folder / "b.jsonl"), "weight": 1, "rename": {"text": "said"}, "filter": {"lang": "de"}},
    ]
    language = {
        "task": {"name": "language_modeling", "block_size": 24, "samples": 0},
        "model": TASKS["packed"]["model"],
    }
    values = language if task == "packed" else {}
    return tiny(data={"sources": sources, "max_length": 32, "deduplicate": True}, output=str(folder / "out"), **values)


@pytest.mark.parametrize("kind", ["classification", pytest.param("packed", marks=pytest.mark.slow)])
def test_sources_of_a_mixture_are_read(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each source has its own keys; texts of two sources never share a block, and a share of each is held out."""
    run = mixture(tmp_path, kind)
    found = against_plain.train_beside_plain(run)
    assert (found.differences, found.uncovered, len(found.steps)) == ([], None, 2)
    read = rows.read_source
    monkeypatch.setattr(rows, "read_source", lambda data, *a: read({**data, "filter": {}}, *a))
    assert against_plain.train_beside_plain(run).differences


@pytest.mark.processes
def test_a_stream_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = streamed(shards(tmp_path / "shards"), f"output={tmp_path / 'out'}")
    found = against_plain.train_beside_plain(run)
    assert (found.differences, found.uncovered, len(found.steps)) == ([], None, 2)
    packed = streamed(shards(tmp_path / "shards"), f"output={tmp_path / 'lm'}", model=TASKS["packed"]["model"], **LM)
    assert str(against_plain.train_beside_plain(packed).uncovered).startswith(
        "data.stream: blocks hold texts of one chunk"
    )
    read = rows.read
    monkeypatch.setattr(rows, "read", lambda *a: {split: some[::-1] for split, some in read(*a).items()})
    assert against_plain.train_beside_plain(run).differences


@pytest.mark.parametrize("kind", ["mean", pytest.param("net", marks=pytest.mark.slow)])
def test_modules_equal_their_functions(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers items that draw random numbers, batch normalization, and a share of train as validation."""
    monkeypatch.syspath_prepend(tmp_path)
    code, functions = {"mean": (MEAN, ()), "net": (NET, NET_FUNCTIONS)}[kind]
    run = job(tmp_path, code, functions=functions)
    found = against_plain.train_beside_plain(run)
    assert (found.differences, found.uncovered, len(found.steps)) == ([], None, 2)
    summed: Callable[..., Any] = Calling.summed
    monkeypatch.setattr(Calling, "summed", lambda self, *a: summed(self, *a) * 1.001)
    assert against_plain.train_beside_plain(run).differences


@pytest.mark.parametrize("coefficient", [0.0, 0.5])
def test_auxiliary_losses_of_a_model_are_added(coefficient: float) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    routers = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": coefficient}
    config = transformers.MixtralConfig(vocab_size=20, num_key_value_heads=1, head_dim=8, **sizes, **routers)
    model = transformers.MixtralForCausalLM(config).eval()
    job = SimpleNamespace(
        run={"task": {"name": "language_modeling"}}, tokenizer=SimpleNamespace(pad_token_id=0), reads_last=False
    )
    tokens = [3, 7, 1, 9, 4, 4, 2]
    found, count = batch_loss(job, model, [{"input_ids": tokens[:-1], "next": tokens[1:]}])
    with torch.no_grad():
        outputs = model(torch.tensor([tokens[:-1]]))
    entropy = torch.nn.functional.cross_entropy(outputs.logits[0], torch.tensor(tokens[1:]), reduction="sum")
    assert count == 6
    assert float(found.detach()) == pytest.approx(float(entropy + 6 * coefficient * outputs.aux_loss), rel=1e-5)
    assert float(outputs.aux_loss) > 0.1  # so that omitting it would show


def test_uncovered_options_are_named(tmp_path: Path) -> None:
    found = against_plain.train_beside_plain(tiny("optim.name=lion", output=str(tmp_path)))
    assert (found.differences, len(found.steps)) == ([], 1)
    assert str(found.uncovered).startswith("optim.name")


# -- faults, one per kind of run ---------------------------------------------------------------------------------------


def mean_of_means(patch: pytest.MonkeyPatch) -> None:
    """Divide each micro-batch's loss by its own number of examples."""
    summed: Callable[..., Any] = Classification.loss_sum
    patch.setattr(Classification, "loss_sum", lambda self, *a: summed(self, *a) * 22 / 8 / len(a[1]))


def divided_twice(task: type[Task]) -> Callable[[pytest.MonkeyPatch], None]:
    summed: Callable[..., Any] = task.loss_sum
    return lambda patch: patch.setattr(task, "loss_sum", lambda self, *a: summed(self, *a) / 2)


def all_predicted(patch: pytest.MonkeyPatch) -> None:
    """Train on prompts as well."""
    collate: Callable[..., Any] = LanguageModeling.collate

    def forgotten(self: Any, columns: Any, rows: Any, index: int) -> Any:
        batch = collate(self, columns, rows, index)
        ids, real = batch.inputs["input_ids"], batch.inputs["attention_mask"]
        wanted = torch.where(real[:, 1:] == 1, ids[:, 1:], -100)
        wanted = torch.cat([wanted, batch.targets[:, -1:]], 1)
        return replace(batch, targets=torch.where(batch.targets < 0, wanted, batch.targets))

    patch.setattr(LanguageModeling, "collate", forgotten)


def mask_forgotten(task: type[Task]) -> Callable[[pytest.MonkeyPatch], None]:
    """Attend to padding as text."""
    collate: Callable[..., Any] = task.collate

    def forgotten(self: Any, *a: Any) -> Any:
        batch = collate(self, *a)
        ones = torch.ones_like(batch.inputs["attention_mask"])
        return replace(batch, inputs={**batch.inputs, "attention_mask": ones})

    return lambda patch: patch.setattr(task, "collate", forgotten)


def reference_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Preference, "reference_scores", lambda self, forward, batch: torch.zeros(len(batch.targets) // 2, 2).double()
    )


def one_token_on(patch: pytest.MonkeyPatch) -> None:
    """Shift the start and end of answers by one token."""
    collate: Callable[..., Any] = QuestionAnswering.collate
    moved = lambda batch: replace(batch, targets=batch.targets + (batch.targets > 0))  # noqa: E731
    patch.setattr(QuestionAnswering, "collate", lambda self, *a: moved(collate(self, *a)))


def unscaled(patch: pytest.MonkeyPatch) -> None:
    """Do not multiply cosines by task.similarity_scale."""
    losses: Callable[..., Any] = Embedding._losses
    patch.setattr(Embedding, "_losses", lambda self, vectors, targets: losses(self, vectors * 0.5, targets))


FAULTS = {
    "classification": mean_of_means,
    "packed": divided_twice(PerToken),
    "documents": divided_twice(PerToken),
    "prompts": all_predicted,
    "messages": all_predicted,
    "translation": mask_forgotten(Translation),
    "token_classification": mask_forgotten(TokenClassification),
    "preference": reference_forgotten,
    "reward": mask_forgotten(Reward),
    "masked": divided_twice(PerToken),
    "questions": one_token_on,
    "pairs": unscaled,
}


def test_differences_are_confirmed_by_more_draws(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a chaotic model with hashed attention, a single perturbation of last bits may by chance have little effect."""
    asked = []

    def compared(job: Job, folder: Path, draws: int) -> against_plain.PlainComparison:
        asked.append(draws)
        step = against_plain.StepComparison(0, {"norm": 2e-4}, {"norm": 1e-4 * draws}, {}, {})
        return against_plain.PlainComparison([step], ["a line"] if step.differs else [])

    monkeypatch.setattr(against_plain, "_compared", compared)
    assert against_plain.compare_with_plain(Job.of(tiny()), folder).differences == []
    assert asked == [1, against_plain.MORE]
