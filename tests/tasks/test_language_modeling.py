"""Language modelling: every token is predicted once, prompts are not, and perplexities are what a plain loop gives."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.cli import main
from lockstep.config.run import Run, RunError, load
from lockstep.data import lm_documents
from lockstep.data.batch import IGNORED
from lockstep.data.job import Job
from lockstep.data.lm_documents import Documents, examples, measured
from lockstep.distributed.world import World
from lockstep.tasks.language_modeling import LanguageModeling
from lockstep.tasks.models.inference import Decoding, by_forward
from lockstep.training.evaluation import evaluate
from lockstep.training.startup import remarks
from support.harness import build, run_on
from support.messages import raises
from support.task_runs import GPT2, make, sentence

pytestmark = pytest.mark.slow  # together a third of the time of tests without processes


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.integers(2, 12), st.booleans())
def test_every_token_is_a_target_once(lengths: list[int], size: int, packed: bool) -> None:
    ends = np.cumsum(lengths)
    ids = np.arange(ends[-1], dtype=np.int32)
    sizes = ends[-1:] if packed else np.asarray(lengths)
    scored = ids % 5 != 3
    found = examples(Documents(ids, scored, ids % 4, ids % 3, sizes), size).to_pylist()
    targets = [t for row in found for t in row["targets"] if t != IGNORED]
    firsts = [0] if packed else (ends - lengths)[np.asarray(lengths) > 0].tolist()
    assert targets == [i for i in ids.tolist() if i not in firsts and scored[i]]
    for row in found:
        assert all(t in (i + 1, IGNORED) for i, t in zip(row["input_ids"], row["targets"], strict=True))
        assert 0 < len(row["input_ids"]) <= size
        learned = [t for t in row["targets"] if t != IGNORED]
        wanted = [len(learned), sum(t % 4 for t in learned), sum(t % 3 for t in learned)]
        assert [row["count"], row["bytes"], row["words"]] == wanted
        assert row["count"] > 0
    if packed and size > 5:
        assert all(len(row["input_ids"]) == size for row in found[:-1])


@pytest.mark.parametrize("window", [3, 2**20])
def test_bytes_and_words_equal_those_of_the_text(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For several texts, any division into tokens, without the white space between texts, and texts without a token."""
    monkeypatch.setattr(lm_documents, "_WINDOW", window)
    texts = ["a b", "  naïve  café\n\u0437\u0438\u043c\u0430 \u51ac 🎿 end ", "", "x", "\n\n", " y\u3000z\u2003"]
    for width in (1, 2, 5):
        spans = [
            [(i, min(len(text), i + width)) for i in range(0, len(text), width) if text[i : i + width].strip()]
            for text in texts
        ]
        ends = np.array([end for each in spans for _, end in each])
        lengths = [len(each) for each in spans]
        found = measured(texts, np.zeros(len(ends)), lengths, ends)
        for text, stop, length in zip(texts, found.ends, lengths, strict=True):
            part = slice(stop - length, stop)
            assert found.bytes[part].sum() == (len(text.encode()) if length else 0)
            assert found.words[part].sum() == (len(text.split()) if length else 0)


def test_white_space_equals_that_of_python() -> None:
    assert lm_documents._SPACES.tolist() == [chr(code).isspace() for code in range(len(lm_documents._SPACES))]
    assert not any(chr(code).isspace() for code in range(len(lm_documents._SPACES) - 1, 0x110000))


def task_of(run: Run) -> LanguageModeling:
    return LanguageModeling(run).opened(Job.of(run).with_data().data)


def test_prompts_are_read_and_not_learned(tmp_path: Path) -> None:
    task = task_of(make(tmp_path, "prompts"))
    columns = task.splits["train"]
    rows = [json.loads(line) for line in (tmp_path / "prompts" / "train.jsonl").read_text().splitlines()]
    assert (columns.lengths < 40).any()  # what is cut at the block's size is not looked at as closely
    for i, row in enumerate(rows):
        ids, targets = columns.ragged("input_ids").row(i), columns.ragged("targets").row(i)
        learned = task.tokenizer.decode(targets[targets != IGNORED])
        assert learned.strip() == (row["answer"] + "[SEP]").strip() or len(ids) == 40
        assert task.tokenizer.decode(ids).strip().startswith(row["question"][:40])


def test_only_the_assistant_is_learned(tmp_path: Path) -> None:
    task = task_of(make(tmp_path, "messages"))
    columns = task.splits["train"]
    rows = [json.loads(line)["messages"] for line in (tmp_path / "messages" / "train.jsonl").read_text().splitlines()]
    assert (columns.lengths < 48).any()  # what is cut is not looked at
    for i, messages in enumerate(rows):
        targets = columns.ragged("targets").row(i)
        if len(targets) < 48:
            said = " ".join(m["content"] for m in messages if m["role"] == "assistant")
            learned = task.tokenizer.decode(targets[targets != IGNORED], skip_special_tokens=True)
            assert learned.split() == said.split()


def judged(world: World, run: Run) -> dict[str, float]:
    task, strategy = build(run, world)
    return evaluate(world, task, strategy, task.splits["validation"])


@pytest.mark.processes
def test_perplexities_equal_those_of_a_plain_loop(tmp_path: Path) -> None:
    run = make(tmp_path, "packed", "strategy.name=single")
    found = run_on(1, judged, run)[0]
    task = task_of(run)
    model = task.model().eval()
    texts = [json.loads(line)["text"] for line in (tmp_path / "packed" / "validation.jsonl").read_text().splitlines()]
    ids = [t for text in texts for t in task.tokenizer(text)["input_ids"]]
    total, size = 0.0, 24
    for at in range(0, len(ids) - 1, size):
        read, wanted = ids[at : at + size], ids[at + 1 : at + size + 1]
        with torch.no_grad():
            logits = model(torch.tensor([read[: len(wanted)]])).logits[0]
        total -= float(torch.log_softmax(logits.double(), -1)[range(len(wanted)), wanted].sum())
    assert found["loss"] == pytest.approx(total / (len(ids) - 1), rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(total / (len(ids) - 1)), rel=1e-6)
    total += first_alone(model, task.tokenizer.bos_token_id or task.tokenizer.eos_token_id, ids[0])
    size = sum(len(text.encode()) for text in texts)
    assert found["bits_per_byte"] == pytest.approx(total / math.log(2) / size, rel=1e-6)
    words = sum(len(text.split()) for text in texts)
    assert found["word_perplexity"] == pytest.approx(math.exp(total / words), rel=1e-6)


def first_alone(model: Any, before: int, first: int) -> float:
    """The loss of a text's first token, after the token that texts begin with."""
    with torch.no_grad():
        return -float(torch.log_softmax(model(torch.tensor([[before]])).logits[0, -1].double(), -1)[first])


@pytest.mark.parametrize(
    "options", [["task.packing=false"], ["task.attend_across_documents=false"], ["task.loss_chunk=16"]]
)
@pytest.mark.parametrize("vocabulary", [120, 400])
def test_bits_per_byte_are_of_the_whole_text(options: list[str], vocabulary: int, tmp_path: Path) -> None:
    """Whatever a tokenizer leaves without a context: short texts, each of which is read by itself."""
    run = make(tmp_path, "packed", "strategy.name=single", f"tokenizer.vocab_size={vocabulary}", *options)
    world = World(run)
    task, strategy = build(run, world)
    found = evaluate(world, task, strategy, task.splits["validation"])
    model = task.model().eval()
    texts = [json.loads(line)["text"] for line in (tmp_path / "packed" / "validation.jsonl").read_text().splitlines()]
    end, total = task.tokenizer.eos_token_id, 0.0
    documents = [task.tokenizer(text)["input_ids"] for text in texts]
    documents = [ids if ids[-1] == end else [*ids, end] for ids in documents]
    stream = [t for ids in documents for t in ids]
    starts = {0} if "chunk" in options[0] else {sum(map(len, documents[:n])) for n in range(len(documents))}
    block = {at: at // 24 for at in range(len(stream))}  # in which a token is read
    if "packing" in options[0]:
        block = {at: (begin, (at - begin) // 24) for at in block for begin in [max(s for s in starts if s <= at)]}
    for at, token in enumerate(stream):
        if at in starts:
            total += first_alone(model, task.tokenizer.bos_token_id or end, token)
            continue
        begin = min(b for b in range(at) if block[b] == block[at - 1] and not starts & set(range(b + 1, at)))
        with torch.no_grad():
            logits = model(torch.tensor([stream[begin:at]])).logits[0, -1]
        total -= float(torch.log_softmax(logits.double(), -1)[token])
    size, words = (sum(map(len, each)) for each in ([t.encode() for t in texts], [t.split() for t in texts]))
    assert found["bits_per_byte"] == pytest.approx(total / math.log(2) / size, rel=1e-6)
    assert math.log(found["byte_perplexity"]) == pytest.approx(total / size, rel=1e-6)
    assert math.log(found["word_perplexity"]) == pytest.approx(total / words, rel=1e-6)


def text_run(folder: Path, *overrides: str, **task: Any) -> Run:
    import random

    draw = random.Random(1)
    path = folder / "input.txt"
    path.write_text("\n".join("so " + sentence(draw) for _ in range(200)))
    values = {
        "name": "text",
        "task": {"name": "language_modeling", "block_size": 32} | task,
        "data": {"source": str(path)},
        "model": GPT2,
        "tokenizer": {"train": "character", "vocab_size": 100},
        "output": str(folder / "out"),
        "micro_batches": 2,
        "batch_size": 8,
        "steps": 30,
        "optim": {"learning_rate": 1e-2},
        "launch": {"processes": 1, "threads": 1, "device": "cpu"},
    }
    return load(None, overrides, values)


@pytest.mark.parametrize(("length", "noted"), [(24, False), (128, False), (300, True)])
def test_max_length_without_effect_is_noted(length: int, noted: bool, tmp_path: Path) -> None:
    run = make(tmp_path, "packed", f"data.max_length={length}")  # of blocks of 24
    notes = remarks(Job.of(run).with_data())
    assert any("data.max_length: 300 has no effect" in note and "(24)" in note for note in notes) == noted


def test_a_text_file_is_cut_at_its_end(tmp_path: Path) -> None:
    task = task_of(text_run(tmp_path))
    text = (tmp_path / "input.txt").read_text()
    held = task.splits["validation"]
    whole = [held.ragged("input_ids").row(0)[0], *(t for i in range(len(held)) for t in held.ragged("targets").row(i))]
    assert task.tokenizer.decode(whole, skip_special_tokens=True) == text[int(len(text) * 0.9) :]


def test_each_line_can_be_a_text(tmp_path: Path) -> None:
    task = task_of(text_run(tmp_path, document="line", packing=False, block_size=48))
    assert task.prepared.facts["texts"] == {"train": 180, "validation": 20}
    first = task.splits["train"].ragged("input_ids").row(0)
    assert "\n" not in task.tokenizer.decode(first)


@pytest.mark.processes
def test_training_lowers_the_loss_and_shows_samples(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = text_run(tmp_path, "evaluate.every=15", sample_prompt="the ")
    path = tmp_path / "run.yaml"
    path.write_text(run.dump())
    assert main(["train", str(path)]) == 0
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["split"] == "validation"]
    assert losses[-1] < losses[0] < math.log(100)
    samples = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    assert [line["step"] for line in samples] == [15, 30]
    assert "samples    the " in capfd.readouterr().out
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "export")
    tokens = AutoTokenizer.from_pretrained(tmp_path / "out" / "export")("the ", return_tensors="pt")["input_ids"]
    assert model.generate(tokens[:, :-1], max_new_tokens=5).shape == (1, 9)
    assert model.config.use_cache
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_greedy_by_forward_is_greedy_by_transformers(tmp_path: Path) -> None:
    """Rows of unequal lengths; the engines' other way pads on the left and keeps what it computed. What a pretrained
    model says about generation holds for neither, and is there afterwards."""
    from lockstep.tasks.models.inference import by_transformers

    task = task_of(make(tmp_path, "documents"))
    model = task.model().eval()
    said = {"no_repeat_ngram_size": 1, "repetition_penalty": 3.0, "forced_eos_token_id": 5, "suppress_tokens": [7]}
    model.generation_config.update(**said)
    batch = task.collate(task.splits["validation"], np.arange(6), 0)
    how = Decoding(8, task.tokenizer.pad_token_id, int(task.tokenizer.sep_token_id))
    with torch.no_grad():
        forward = lambda inputs: model(**inputs).logits  # noqa: E731
        assert torch.equal(
            by_forward(forward, lambda n: n, batch.inputs, how), by_transformers(model, batch.inputs, how)
        )
        kept = {name: getattr(model.generation_config, name) for name in said}
        assert kept == said
        own = model.generate(batch.inputs["input_ids"][:1], max_new_tokens=8, do_sample=False)[0, -8:]
    assert len(set(own.tolist())) == 8  # the control: it would have had an effect


BAD: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "no such column": ({"text": "txt"}, [], ["task.text", "'txt'", "it has text"]),
    "a prompt without a response": ({"prompt": "text"}, [], ["prompt and response"]),
    "prompts and messages": ({"prompt": "a", "response": "b", "messages": "c"}, [], ["prompt", "messages", "LS3051"]),
    "a template for nothing": ({"chat_template": "x"}, [], ["chat_template has an effect only with task.messages"]),
    "no such column of messages": ({"messages": "chat"}, [], ["task.messages", "'chat'"]),
    "texts are no messages": ({"messages": "text"}, [], ["lists of role and content", "row 0"]),
    "a block longer than the positions": ({"block_size": 64}, [], ["task.block_size", "positions for 48"]),
    "a model that is no language model": ({}, ["model={type: vit}"], ["no causal language model", "vit"]),
    "nothing to predict": (
        {"prompt": "text", "response": "text", "block_size": 2, "document": "line"},
        [],
        ["has no token to predict", "task.block_size"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_one_message(case: str, tmp_path: Path) -> None:
    task, overrides, wanted = BAD[case]
    with pytest.raises(RunError) as caught:
        task_of(text_run(tmp_path, *overrides, **task))
    for part in wanted:
        assert part in str(caught.value)


def test_messages_need_a_template_that_fits(tmp_path: Path) -> None:
    for template, code, value in (
        ("null", "LS3351", "task.chat_template"),
        ("'{{ messages | length }}'", "LS2044", "row 0, message 1 "),
    ):
        with raises(code, value):
            task_of(make(tmp_path, "messages", f"task.chat_template={template}"))


def test_tiny_shakespeare_is_cut_as_nanogpt_cuts_it(shared: Path) -> None:
    run = load(
        None,
        [],
        {
            "task": {"name": "language_modeling", "block_size": 64},
            "data": {"source": str(shared / "tinyshakespeare" / "input.txt")},
            "model": {"type": "gpt2", "config": {"n_positions": 64}},
            "tokenizer": {"train": "character", "vocab_size": 100},
        },
    )
    task = task_of(run)
    assert len(task.tokenizer) == 65 + 5  # nanoGPT's 65 characters, and the special tokens
    counts = {split: int(columns.flat("count").sum()) for split, columns in task.splits.items()}
    assert counts == {"train": 1_003_854, "validation": 111_540}  # the end token takes the place of the first one
