"""Translation: the shift, the smoothing, BLEU and chrF from sums, decoding, tokenizers and what is exported."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.cli import main
from lockstep.config import plugins
from lockstep.config.run import Run, RunError
from lockstep.data.batch import IGNORED
from lockstep.data.job import Job
from lockstep.distributed.world import World
from lockstep.tasks.models.inference import Decoding, by_forward, by_transformers
from lockstep.tasks.translation import SIZES, Overlap, Translation
from lockstep.training.evaluation import evaluate
from lockstep.training.resolve import resolve_strategy
from support.harness import build, run_on
from support.marks import long, needs
from support.messages import raises
from support.task_runs import MARIAN, make, sentence, trained, write

pytest.importorskip("sacrebleu")
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF


def task_of(run: Run) -> Translation:
    return Translation(run).opened(Job.of(run).with_data().data)


def rows_in(folder: Path, split: str) -> list[dict[str, str]]:
    lines = (folder / "translation" / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["translation"] for line in lines]


def test_the_decoder_reads_shifted_targets(tmp_path: Path) -> None:
    task = task_of(make(tmp_path, "translation"))
    columns = task.splits["train"]
    batch = task.collate(columns, np.arange(7), 0)
    read, targets = batch.inputs["decoder_input_ids"], batch.targets
    start = task.entries["decoder_start_token_id"]
    for i, row in enumerate(rows_in(tmp_path, "train")[:7]):
        wanted = task.tokenizer(row["de"])["input_ids"]
        assert wanted[-1] == task.tokenizer.sep_token_id
        assert targets[i].tolist() == wanted + [IGNORED] * (targets.shape[1] - len(wanted))
        assert read[i, : len(wanted)].tolist() == [start, *wanted[:-1]]
    assert task.count_targets(columns, np.arange(7)) == int((targets != IGNORED).sum())
    from transformers.models.marian.modeling_marian import shift_tokens_right

    assert torch.equal(read, shift_tokens_right(targets, task.tokenizer.pad_token_id, start))


def test_lengths_equal_those_of_source_and_target(tmp_path: Path) -> None:
    columns = task_of(make(tmp_path, "translation")).splits["train"]
    source, target = (columns.ragged(name).lengths for name in ("input_ids", "target_ids"))
    assert (columns.lengths == source + target).all()
    assert (source != target).any()


def test_label_smoothing_matches_its_definition_without_padding(tmp_path: Path) -> None:
    task = task_of(make(tmp_path, "translation", "task.label_smoothing=0.1"))
    batch = task.collate(task.splits["train"], np.arange(5), 0)
    with torch.no_grad():
        outputs = task.model().eval()(**batch.inputs)
    logs = outputs.logits.double().log_softmax(-1)
    total = 0.0
    for b, t in (batch.targets != IGNORED).nonzero().tolist():
        total -= 0.9 * float(logs[b, t, batch.targets[b, t]]) + 0.1 * float(logs[b, t].mean())
    assert float(task.loss_sum(outputs, batch.targets)) == pytest.approx(total, rel=1e-5)
    plain = task.score(lambda inputs: outputs.logits, batch)["loss"]
    assert float(plain) < total - 1e-3  # what is reported is not smoothed


@pytest.mark.parametrize("parts", [1, 3, 7])
def test_scores_of_sums_match_sacrebleu(parts: int) -> None:
    draw = random.Random(parts)
    references = [sentence(draw) for _ in range(41)] + ["", "Ein Mann, der \u201etanzt\u201c."]
    written = [" ".join(w for w in r.split() if draw.random() < 0.8) + draw.choice(["", " .", "!"]) for r in references]
    overlap = Overlap("13a")
    sums = {name: torch.zeros(size, dtype=torch.float64) for name, size in SIZES.items()}
    for part in range(parts):
        for name, counts in overlap.sums(written[part::parts], references[part::parts]).items():
            sums[name] += torch.from_numpy(counts)
    found = overlap.scores(sums)
    assert found["bleu"] == BLEU().corpus_score(written, [references]).score  # ==, not nearly
    assert found["chrf"] == CHRF().corpus_score(written, [references]).score
    assert 20 < found["bleu"] < 95


def gathered(world: World, run: Run) -> tuple[dict[str, float], list[tuple[int, str]]]:
    """Scores, and what this rank wrote for which row."""
    task, strategy = build(run, world)
    assert isinstance(task, Translation)
    assert task.overlap is not None
    seen: list[tuple[int, str]] = []
    plain, rows_of_texts = task._overlaps, task.score_texts

    def score_texts(generate: Any, batch: Any, columns: Any, rows: np.ndarray) -> Any:
        def overlaps(written: list[str], references: list[str]) -> Any:
            seen.extend(zip(rows.tolist(), written, strict=True))
            return plain(written, references)

        task._overlaps = overlaps  # type: ignore[method-assign]
        return rows_of_texts(generate, batch, columns, rows)

    task.score_texts = score_texts  # type: ignore[method-assign]
    return evaluate(world, task, strategy, task.splits["validation"]), seen


def teach(folder: Path, name: str, *overrides: str) -> Run:
    """A run whose evaluation batches are more than one a rank, and not equally many."""
    return make(folder, "translation", f"strategy.name={name}", "evaluate.batch_size=4", *overrides)


Alone = Callable[[int], tuple[dict[str, float], list[tuple[int, str]]]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """The results of one process, by number of beams."""

    @cache
    def of(beams: int) -> tuple[dict[str, float], list[tuple[int, str]]]:
        run = teach(tmp_path_factory.mktemp("alone"), "single", f"task.beams={beams}")
        return run_on(1, gathered, run)[0]

    return of


@pytest.mark.processes
@pytest.mark.parametrize(("name", "ranks"), [long("ddp", 2), ("ddp", 3), ("fsdp2", 2), ("pipeline", 2), ("zero2", 2)])
@pytest.mark.parametrize("beams", [1, 3])
def test_ranks_share_translations_and_scores_are_corpus_scores(
    name: str, ranks: int, beams: int, tmp_path: Path, alone: Alone
) -> None:
    if name not in plugins.names("strategies") or (name in ("pipeline", "zero2") and beams > 1):
        pytest.skip("decodes greedily only, see below")
    if name == "zero2":
        needs("deepspeed")
    stages = ("strategy.options.stages=2",) if name == "pipeline" else ()
    run = teach(tmp_path, name, f"task.beams={beams}", *stages)
    found = run_on(ranks, gathered, run)
    scores, said = alone(beams)
    assert all(result[0] == found[0][0] for result in found)
    assert found[0][0]["bleu"] == scores["bleu"]
    assert found[0][0]["chrf"] == scores["chrf"]
    if name != "pipeline":  # whose stages all see the same rows
        assert sorted(pair for _, part in found for pair in part) == sorted(said)
    references = [row["de"] for row in rows_in(tmp_path, "validation")]
    written = [text for _, text in sorted(said)]
    assert len(written) == len(references)
    assert scores["bleu"] == BLEU().corpus_score(written, [references]).score


def test_beam_search_is_refused_under_strategies_without_it(tmp_path: Path) -> None:
    run = teach(tmp_path, "pipeline", "task.beams=2", "strategy.options.stages=2")
    with raises("LS5131"):
        resolve_strategy(run, 2)
    nothing_written = teach(tmp_path, "pipeline", "task.beams=2", "task.bleu=false", "task.samples=0")
    assert resolve_strategy(nothing_written, 2)


def test_greedy_by_forward_is_greedy_by_transformers(tmp_path: Path) -> None:
    task = task_of(make(tmp_path, "translation"))
    model = task.model().eval()
    batch = task.collate(task.splits["validation"], np.arange(6), 0)
    how = Decoding(9, task.tokenizer.pad_token_id, task.tokenizer.eos_token_id, task.entries["decoder_start_token_id"])
    inputs = {k: v for k, v in batch.inputs.items() if not k.startswith("decoder")}
    turns = []

    def forward(asked: Any) -> torch.Tensor:
        turns.append(asked["decoder_input_ids"].shape[1])
        return model(**asked).logits

    with torch.no_grad():
        found = by_forward(forward, lambda count: count, inputs, how)
        assert torch.equal(found, by_transformers(model, inputs, how))
        turns.clear()
        others = iter([1] * 11 + [0])  # another rank, which may write more, goes on for two turns
        assert torch.equal(by_forward(forward, lambda count: count + next(others), inputs, how), found)
    assert len(turns) == 12


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["wordlevel", "bpe", "unigram"])
@pytest.mark.parametrize("tokenizers", ["shared", "separate"])
def test_training_and_what_is_exported(kind: str, tokenizers: str, tmp_path: Path) -> None:
    run = make(
        tmp_path,
        "translation",
        f"tokenizer.train={kind}",
        f"task.tokenizers={tokenizers}",
        "steps=16",
        "micro_batches=2",
        "launch.processes=1",
        "strategy.name=single",
        "optim.learning_rate=1e-2",
        "evaluate.every=8",
    )
    path = tmp_path / "run.yaml"
    path.write_text(run.dump())
    assert main(["train", str(path)]) == 0
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    first, last = (line for line in lines if line["split"] == "validation")
    assert last["loss"] < first["loss"]
    assert {"perplexity", "bleu", "chrf"} <= set(last)
    samples = json.loads((tmp_path / "out" / "samples.jsonl").read_text().splitlines()[-1])["samples"]
    assert len(samples) == 3
    assert all(list(sample) == ["source", "written", "reference"] for sample in samples)
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    export = tmp_path / "out" / "export"
    model, known = AutoModelForSeq2SeqLM.from_pretrained(export), AutoTokenizer.from_pretrained(export)
    targets = AutoTokenizer.from_pretrained(export / "target") if tokenizers == "separate" else known
    assert (export / "target").is_dir() == (tokenizers == "separate")
    asked = known("the dog sees a cat .", return_tensors="pt")
    tokens = model.generate(input_ids=asked["input_ids"], max_new_tokens=20)
    task = task_of(run)
    how = task._decoding()
    ours = by_transformers(model, {"input_ids": asked["input_ids"]}, how)[0]
    length = tokens.shape[1] - 1
    assert tokens[0, 1:].tolist() == ours[:length].tolist()  # with transformers' defaults, from what was exported
    assert isinstance(targets.decode(tokens[0], skip_special_tokens=True), str)
    assert model.config.use_cache


@pytest.mark.processes
def test_a_model_with_two_tokenizers_is_trained_on_with_both(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its export holds them, a run from that export finds them again, and so does the export of that run."""
    one = ("launch.processes=1", "strategy.name=single", "micro_batches=2", "steps=2", "task.bleu=false")
    first = make(tmp_path, "translation", "task.tokenizers=separate", *one)
    (tmp_path / "run.yaml").write_text(first.dump())
    assert main(["train", str(tmp_path / "run.yaml")]) == 0
    wanted = task_of(first)
    export = tmp_path / "out" / "export"
    again = make(tmp_path, "translation", *one, f"model={{source: {export}}}", "tokenizer={}", f"output={tmp_path}/two")
    task = task_of(again)
    assert task.target_tokenizer.get_vocab() == wanted.target_tokenizer.get_vocab() != task.tokenizer.get_vocab()
    for name in ("input_ids", "target_ids"):
        ours, theirs = (t.splits["train"].ragged(name) for t in (task, wanted))
        assert [ours.row(i).tolist() for i in range(90)] == [theirs.row(i).tolist() for i in range(90)]
    (tmp_path / "two.yaml").write_text(again.dump())
    assert main(["train", str(tmp_path / "two.yaml")]) == 0
    for name in ("tokenizer.json", "target/tokenizer.json"):
        ours, theirs = (json.loads((tmp_path / out / "export" / name).read_text()) for out in ("two", "out"))
        assert ours["model"] == theirs["model"]
    copy = shutil.copytree(export, tmp_path / "copy")  # by itself: of a run's own export the damage is told
    shutil.rmtree(copy / "target")
    capfd.readouterr()
    assert main(["train", str(tmp_path / "two.yaml"), f"output={tmp_path}/three", f"model.source={copy}"]) == 2
    said = capfd.readouterr().err
    assert "has a separate vocabulary for targets, but no tokenizer for it in target/" in said


def test_two_plain_columns(tmp_path: Path) -> None:
    rows = [{"a": "one two", "b": "eins zwei"}, {"a": "three", "b": "\u0007"}] * 20
    path = tmp_path / "pairs.jsonl"
    write(path, rows)
    columns = ("task.source=a", "task.target=b", "task.prefix='to b: '")
    task = task_of(
        make(tmp_path, "translation", *columns, f"data={json.dumps({'source': str(path), 'max_length': 32})}")
    )
    held = task.splits["validation"]  # three or four of them, cut off
    assert set(held.texts("reference", np.arange(4))) <= {"eins zwei", "\u0007"}
    assert "to b: " in task.tokenizer.decode(held.ragged("input_ids").row(0))
    assert min(held.ragged("target_ids").lengths) >= 1  # an empty target has its end token


BART = {k: v for k, v in MARIAN["config"].items() if k != "dropout"}
BAD: dict[str, tuple[list[str], list[str]]] = {
    "no such language": (["task.target=fr"], ["task.target", "'fr'", "it has en, de"]),
    "twice the same": (["task.target=en"], ["task.target", "also task.source"]),
    "smoothing of all": (["task.label_smoothing=1"], ["task.label_smoothing"]),
    "no such tokenizer of sacrebleu": (["task.bleu_tokenizer=14a"], ["task.bleu_tokenizer", "'14a'", "13a"]),
    "a model that has no encoder": (["model={type: gpt2}"], ["no encoder-decoder model", "gpt2"]),
    "separate ones for bart": (
        ["task.tokenizers=separate", f"model={json.dumps({'type': 'bart', 'config': BART})}"],
        ["task.tokenizers", "bart", "marian"],
    ),
    "separate ones that are not trained": (
        ["task.tokenizers=separate", "tokenizer={source: somewhere}"],
        ["task.tokenizers", "tokenizer.train"],
    ),
    "more decoder than encoder layers in T5": (
        ["model={type: t5, config: {num_layers: 2, num_decoder_layers: 6}}"],
        ["model.config", "6 decoder layers", "num_decoder_layers"],
    ),
    "too long": (["data.max_length=65"], ["data.max_length", "positions for 64"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_one_message(case: str, tmp_path: Path) -> None:
    overrides, wanted = BAD[case]
    with pytest.raises(RunError) as caught:
        task_of(make(tmp_path, "translation", *overrides))
    for part in wanted:
        assert part in str(caught.value)


def test_missing_sacrebleu_is_named_with_its_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises("LS3373"):
        Translation(make(tmp_path, "translation")).prepare()


OTHERS = {
    "bart": BART,
    "t5": {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2},
}
# Where its code sees FSDP it runs the layers that it drew to leave out.
NLLB_MOE = OTHERS["bart"] | {"decoder_layerdrop": 0.5, "num_experts": 4, "expert_capacity": 32}


@pytest.mark.parametrize("family", [*OTHERS, "fsmt"])
def test_start_tokens_of_other_families(family: str, tmp_path: Path) -> None:
    model = json.dumps({"type": family, "config": OTHERS.get(family, BART)})
    task = task_of(make(tmp_path, "translation", f"model={model}"))
    batch = task.collate(task.splits["train"], np.arange(4), 0)
    start = task.tokenizer.eos_token_id if family in ("bart", "fsmt") else task.tokenizer.pad_token_id
    assert batch.inputs["decoder_input_ids"][:, 0].tolist() == [start] * 4


PROPHETNET = {"hidden_size": 32, "num_encoder_layers": 1, "num_decoder_layers": 1, "num_encoder_attention_heads": 2,
              "num_decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
              "disable_ngram_loss": True, "eps": 0.0}  # fmt: skip


def test_prophetnet_gets_a_padding_mask(tmp_path: Path) -> None:
    """Its relative positions move with it."""
    model = json.dumps({"type": "prophetnet", "config": PROPHETNET})
    run = make(tmp_path, "translation", f"model={model}")
    task = task_of(run)
    batch = task.collate(task.splits["train"], np.arange(4), 0)
    lengths = task.splits["train"].ragged("target_ids").lengths[:4]
    assert batch.inputs["decoder_attention_mask"].sum(1).tolist() == lengths.tolist()
    assert len(set(lengths.tolist())) > 1


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("family", [*OTHERS, "nllb-moe"])
def test_other_families_have_the_same_bits_in_shards(family: str, tmp_path: Path) -> None:
    """Gradients of the encoder's output, from every decoder layer, are added in the order of an unsharded model."""
    model = json.dumps({"type": family, "config": OTHERS.get(family, NLLB_MOE)})
    found = []
    for name, ranks in (("single", 1), ("fsdp2", 2)):
        run = make(tmp_path, "translation", f"model={model}", f"strategy.name={name}", "task.bleu=false")
        found.append(run_on(ranks, trained, run)[0])
    assert found[0]["digest"] == found[1]["digest"]
    assert found[0]["norm"] == found[1]["norm"]


def test_multi30k_is_read_unchanged(shared: Path) -> None:
    from lockstep.config.run import load

    folder = shared / "multi30k"
    values = {
        "task": {"name": "translation", "source": "en", "target": "de"},
        "data": {"source": str(folder), "test": "test_2016_flickr.jsonl", "limit": 1100},
        "model": MARIAN | {"config": MARIAN["config"] | {"max_position_embeddings": 128}},
        "tokenizer": {"train": "bpe", "vocab_size": 1000},
    }
    task = task_of(load(None, [], values))
    assert {split: len(columns) for split, columns in task.splits.items()} == {
        "train": 1100,
        "validation": 1014,
        "test": 1000,
    }
    row = json.loads((folder / "test_2016_flickr.jsonl").read_text(encoding="utf-8").splitlines()[3])["translation"]
    test = task.splits["test"]
    assert test.texts("reference", np.array([3])) == [row["de"]]
    assert task.tokenizer.decode(test.ragged("input_ids").row(3), skip_special_tokens=True).strip() == row["en"]


@pytest.mark.processes
@pytest.mark.parametrize("tokenizers", ["shared", "separate"])
def test_the_code_of_the_model_card_works(tokenizers: str, tmp_path: Path) -> None:
    one = ("strategy.name=single", "launch.processes=1", "micro_batches=2", "steps=2")
    run = make(tmp_path, "translation", f"task.tokenizers={tokenizers}", *one)
    (tmp_path / "run.yaml").write_text(run.dump())
    assert main(["train", str(tmp_path / "run.yaml")]) == 0
    card = (tmp_path / "out" / "export" / "README.md").read_text(encoding="utf-8")
    assert "Labels" not in card
    code = (
        card.partition("```python\n")[2].partition("```")[0].replace("PATH_OR_REPO", str(tmp_path / "out" / "export"))
    )
    exec(code, {})
