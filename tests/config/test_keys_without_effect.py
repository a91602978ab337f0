"""Keys that have no effect beside other keys of a run file are refused by name, or noted; none is ignored in
silence."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset

from lockstep.config.run import Run, load
from lockstep.data.job import Job
from lockstep.data.prepare import prepare
from lockstep.strategies.ddp import DDP
from lockstep.strategies.fsdp2 import FSDP2
from lockstep.tasks.language_modeling import LanguageModeling
from lockstep.tasks.models import model_configs
from lockstep.tasks.task import make_task
from lockstep.training.startup import remarks, unused_links, without_effect
from support.harness import tiny
from support.messages import raises
from support.own_modules import NET, NET_FUNCTIONS, job
from support.task_runs import make, write

SCRATCH: dict[str, Any] = {"data": "builtin/emotion", "model": {"type": "gpt2"}, "tokenizer": {"train": "bpe"}}
LM = "task.name=language_modeling"
# Words of a run file -> the code and the key of its refusal.
REFUSED: dict[tuple[str, ...], tuple[str, str]] = {
    ("model.revision=main",): ("LS1136", "revision"),
    ("model.trust_remote_code=true",): ("LS1108", "model.trust_remote_code"),
    ("tokenizer.train=null", "tokenizer.source=gpt2", "tokenizer.vocab_size=90"): ("LS1137", "vocab_size"),
    (LM, "task.text=a", "task.prompt=q", "task.response=r"): ("LS3057", "task.text"),
    (LM, "task.text=a", "task.messages=m"): ("LS3057", "task.text"),
    ("task.name=embedding", "task.score=score", "task.corpus=9"): ("LS3024", "corpus"),
}
REFUSED[("task.name=image_classification", "tokenizer={}", "data.padding=batch")] = ("LS1119", "data.padding")
TAKEN = [
    ("model.trust_remote_code=true", "tokenizer.train=null", "tokenizer.source=some/tokenizer"),
    (LM, "task.text=a"),
]


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_keys_without_effect_are_refused_before_data_is_read(words: tuple[str, ...]) -> None:
    with raises(*REFUSED[words]):
        load(None, words, SCRATCH)


@pytest.mark.parametrize("words", TAKEN, ids=" ".join)
def test_the_control_keys_with_effect_are_accepted(words: tuple[str, ...]) -> None:
    load(None, words, SCRATCH)


def notes(run: Run) -> list[str]:
    return remarks(Job.of(run).with_data())


def test_validation_fraction_is_noted_if_the_data_has_a_validation_split(tmp_path: Path) -> None:
    run = make(tmp_path, "packed", "data.validation_fraction=0.3")
    assert any("data.validation_fraction: 0.3 has no effect" in note for note in notes(run))
    cut = make(tmp_path, "packed", "data.validation_fraction=0.3", f"data.train={tmp_path}/packed/train.jsonl")
    cut = cut.model_copy(update={"data": cut.data.model_copy(update={"source": None})})
    assert not any("validation_fraction" in note for note in notes(cut))


def test_validation_fraction_has_no_effect_if_every_source_has_a_validation_split(tmp_path: Path) -> None:
    texts = [{"text": f"text {place} of the source"} for place in range(20)]
    for name, splits in (("a", ("train", "validation")), ("b", ("train", "validation")), ("c", ("train",))):
        (tmp_path / name).mkdir()
        for split in splits:
            write(tmp_path / name / f"{split}.jsonl", [{"text": f"{name} {split} {row['text']}"} for row in texts])

    def of(*names: str) -> list[str]:
        sources = [{"name": name, "source": str(tmp_path / name)} for name in names]
        run = make(tmp_path, "packed")
        data = {"sources": sources, "validation_fraction": 0.3, "max_length": 24}
        return notes(load(None, [], run.model_dump() | {"data": data}))

    assert any("validation_fraction" in note for note in of("a", "b"))
    assert not any("validation_fraction" in note for note in of("a", "c"))


def test_document_line_is_refused_without_text_files(tmp_path: Path) -> None:
    with raises("LS2256", "task.document"):
        prepare(make(tmp_path, "packed", "task.document=line"), LanguageModeling)


def test_an_encoding_of_files_that_hold_no_text(tmp_path: Path) -> None:
    run = make(tmp_path, "packed", "data.encoding=latin-1")
    prepare(run, LanguageModeling)
    for split in ("train", "validation"):
        path = tmp_path / "packed" / f"{split}.jsonl"
        Dataset.from_json(str(path)).to_parquet(path.with_suffix(".parquet"))
        path.unlink()
    with raises("LS2189", "data.encoding"):
        prepare(run, LanguageModeling)


def test_a_revision_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    run = load(None, ["model.type=null", f"model.source={tmp_path}"], SCRATCH)
    assert model_configs.local_or_id(run.model) == str(tmp_path)
    run = load(None, ["model.type=null", f"model.source={tmp_path}", "model.revision=main"], SCRATCH)
    with raises("LS3136", "model.revision", str(tmp_path)):
        model_configs.local_or_id(run.model)


def test_a_variable_that_the_chat_template_does_not_read(tmp_path: Path) -> None:
    with raises("LS3058", "task.template_arguments", "enable_thinking"):
        prepare(make(tmp_path, "messages", "task.template_arguments={enable_thinking: false}"), LanguageModeling)


@pytest.mark.parametrize(
    ("words", "noted"),
    [
        (("strategy.name=ddp",), False),
        (("strategy.name=single",), True),
        (("strategy.name=ddp", "strategy.exact=false"), True),
        (("strategy.name=zero2",), True),
        (("strategy.name=fsdp2",), False),
    ],
)
def test_all_reduce_without_effect_is_noted(words: tuple[str, ...], noted: bool) -> None:
    found = unused_links(Job.of(tiny(*words, "strategy.all_reduce=hierarchical")))
    assert any("strategy.all_reduce: hierarchical has no effect" in note for note in found) == noted
    assert not unused_links(Job.of(tiny(*words)))


@pytest.mark.parametrize(
    ("kind", "words", "key"),
    [
        ("packed", ("task.sample_prompt=the dog", "task.samples=0"), "task.sample_prompt"),
        ("translation", ("task.bleu_tokenizer=char", "task.bleu=false"), "task.bleu_tokenizer"),
    ],
)
def test_keys_of_what_another_key_turns_off_are_noted(
    kind: str, words: tuple[str, ...], key: str, tmp_path: Path
) -> None:
    for given, noted in ((words, True), (words[:1], False), (words[1:], False)):
        run = make(tmp_path, kind, *given)
        resolved = Job.of(run).with_data()
        assert any(note.startswith(f"{key} has no effect") for note in remarks(resolved)) == noted
        assert not make_task(resolved).warnings  # nothing by which processes could differ


@pytest.mark.parametrize(
    ("strategy", "keys", "noted"),
    [
        (DDP, ("checkpoint.at=[3, 10, 12]",), ["checkpoint.at: 10, 12 are after the last step, 9"]),
        (DDP, ("launch.replicate_every=2",), ["launch.replicate_every"]),
        (FSDP2, ("launch.replicate_every=2", "checkpoint.at=[9]"), []),
        (DDP, ("launch.processes_per_gpu=2",), ["launch.processes_per_gpu has no effect on CPUs"]),
        (DDP, ("hub.private=false",), ["hub.private has no effect without hub.push_to"]),
        (DDP, ("hub.private=false", "hub.push_to=me/mine"), []),
        (DDP, ("profile.after=1",), ["profile.after has no effect without profile.steps"]),
        (DDP, ("profile.after=1", "profile.steps=1"), []),
        (DDP, ("sdc_check.on_difference=retry",), ["sdc_check.on_difference has no effect without sdc_check.every"]),
        (DDP, ("sdc_check.on_difference=retry", "sdc_check.every=5"), []),
        (DDP, ("track.close_timeout_s=5",), ["track.close_timeout_s has no effect without a tracker"]),
        (DDP, ("track.close_timeout_s=5", "track.to=tensorboard"), []),
    ],
)
@pytest.mark.parametrize("processes", [1, 2])
def test_keys_made_ineffective_by_others_are_noted(
    strategy: type[Any], keys: tuple[str, ...], noted: list[str], processes: int
) -> None:
    lines = without_effect(job_of(strategy, *keys), 9, processes, on_cpu=True)
    assert len(lines) == len(noted)
    assert all(line.startswith(words) for line, words in zip(lines, noted, strict=True))


def job_of(strategy: type[Any], *keys: str) -> Any:
    """Return the parts of a job that `without_effect` reads."""
    run = tiny(f"strategy.name={strategy.__name__.lower()}", "launch.on_rank_failure=continue", *keys)
    return SimpleNamespace(run=run, strategy=strategy)


def test_rebalancing_needs_several_processes() -> None:
    alone, two = (without_effect(job_of(DDP, "launch.rebalance_every=2"), 9, n, on_cpu=True) for n in (1, 2))
    assert (alone, two) == (["launch.rebalance_every has no effect on one process"], [])


def test_samples_and_a_share_for_validation_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)

    def said(*words: str) -> str:
        run = job(tmp_path, NET, "task.generate=null", *words, functions=NET_FUNCTIONS)

        resolved = Job.of(run).with_data()
        assert not make_task(resolved).warnings
        return "\n".join(remarks(resolved))

    assert "data.validation_fraction: 0.3 has no effect" in said("data.validation_fraction=0.3")  # NET brings a split
    assert "task.samples has no effect" in said("task.samples=1")
    assert "no effect" not in said()
