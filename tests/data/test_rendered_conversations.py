"""The loader's tokens of a conversation are exactly those of the tokenizer's `apply_chat_template`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from lockstep.config.plugins import find
from lockstep.config.run import Run, load
from lockstep.data.arrow_cache import Columns, Prepared
from lockstep.data.batch import IGNORED
from lockstep.data.conversations import Writing, documents_of
from lockstep.data.job import Job
from lockstep.data.prepare import prepare, warnings
from lockstep.tasks.answer_pairs import AnswerPairOptions, tokens_of
from lockstep.tasks.models import inference
from lockstep.tasks.models import models as building
from lockstep.tasks.task import make_task
from support.harness import TINY
from support.messages import raises

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{{ m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = CHATML.replace(
    "{{ m['content'] + '<|im_end|>' + '\n' }}",
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>' + '\n' }}{% endif %}",
)
TALK = [
    {"role": "user", "content": "one two"},
    {"role": "assistant", "content": "three"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "one three"},
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = ["[UNK]", "<|im_start|>", "<|im_end|>", "\n", "user", "assistant", "one", "two", "three"]
    fast = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    fast.pre_tokenizer = pre_tokenizers.Sequence([fast.pre_tokenizer, pre_tokenizers.Split("\n", "isolated")])
    made = PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="[UNK]", eos_token="<|im_end|>")
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    made.chat_template = CHATML
    return made


@pytest.mark.parametrize("each", [False, True])
def test_a_conversation_ends_as_its_template_ends_it(tokenizer: PreTrainedTokenizerFast, each: bool) -> None:
    rows = Dataset.from_dict({"messages": [TALK]})
    (documents, count), *rest = documents_of(rows, tokenizer, Writing("messages", each=each), range(1))
    assert (rest, count) == ([], 1)
    rendered = [tokenizer.apply_chat_template(TALK[:n], return_dict=False) for n in ((2, 4) if each else (4,))]
    assert documents.ids.tolist() == [token for ids in rendered for token in ids]
    assert documents.lengths.tolist() == [len(ids) for ids in rendered]
    assert rendered[-1][-2:] == tokenizer.convert_tokens_to_ids(["<|im_end|>", "\n"])  # no second end token
    answers = [["three", "<|im_end|>", "\n"], ["one", "three", "<|im_end|>", "\n"]]
    learned = [token for token, scored in zip(documents.ids.tolist(), documents.scored.tolist(), strict=True) if scored]
    assert tokenizer.convert_ids_to_tokens(learned) == [token for answer in answers for token in answer]


@pytest.mark.parametrize("each", [False, True])
def test_tokens_in_generation_blocks_are_targets(tokenizer: PreTrainedTokenizerFast, each: bool) -> None:
    """Compared with the mask of transformers; for `per_turn`, with the mask of the last turn."""
    rows = Dataset.from_dict({"messages": [TALK]})
    ((documents, _),) = documents_of(rows, tokenizer, Writing("messages", MARKED, each=each), range(1))
    asked = {"chat_template": MARKED, "return_dict": True, "return_assistant_tokens_mask": True}
    rendered = [tokenizer.apply_chat_template(TALK[:n], **asked) for n in ((2, 4) if each else (4,))]
    masks = [list(one["assistant_masks"]) for one in rendered]
    if each:
        first = sum(masks[0])
        masks[1] = [int(mark and place > masks[1].index(1) + first) for place, mark in enumerate(masks[1])]
    assert documents.ids.tolist() == [token for one in rendered for token in one["input_ids"]]
    assert documents.scored.tolist() == [bool(mark) for mask in masks for mark in mask]
    plain = documents_of(rows, tokenizer, Writing("messages", each=each), range(1))
    assert documents.scored.sum() == next(iter(plain))[0].scored.sum() - 2  # control: newlines are targets there


def test_a_template_without_a_generation_block_for_a_turn_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    template = MARKED.replace("m['role'] == 'assistant'", "m['content'] == 'one three'")
    rows = Dataset.from_dict({"messages": [TALK]})
    (_, _), *_ = documents_of(rows, tokenizer, Writing("messages", template), range(1))  # of two turns
    with raises("LS2400", "row 0", "message 1"):
        list(documents_of(rows, tokenizer, Writing("messages", template, each=True), range(1)))


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_only_the_answers_of_a_pair_are_targets(tokenizer: PreTrainedTokenizerFast, template: str) -> None:
    options = AnswerPairOptions(chosen="a", rejected="b", conversations=True, chat_template=template)
    ids, targets = tokens_of(tokenizer, options, TALK[:3], TALK[3:])
    assert ids == tokenizer.apply_chat_template(TALK, chat_template=template, return_dict=False)
    learned = [token for token in targets if token != IGNORED]
    # what the template marks, if it does: not the newline after the turn
    end = ["<|im_end|>"] if template == MARKED else ["<|im_end|>", "\n"]
    assert tokenizer.convert_ids_to_tokens(learned) == ["one", "three", *end]
    assert {token for token, target in zip(ids, targets, strict=True) if target not in (token, IGNORED)} == set()


# -- packing, limits, predictions --------------------------------------------------------------------------------------

TALKS = [TALK, TALK[:2], [*TALK[2:], *TALK[:2]]]
NO_END = CHATML.replace("<|im_end|>", "")


def run_of(folder: Path, tokenizer: PreTrainedTokenizerFast, template: str, **task: Any) -> Run:
    """Return a run on three conversations, each three times."""
    tokenizer.save_pretrained(folder / "tokenizer")
    lines = [
        json.dumps({"messages": messages, "chosen": [messages[-1]], "prompt": messages[:-1]}) for messages in TALKS
    ]
    rows = [json.dumps(json.loads(line) | {"rejected": [{"role": "assistant", "content": "two"}]}) for line in lines]
    (folder / "train.jsonl").write_text("\n".join(rows * 3) + "\n")
    (folder / "validation.jsonl").write_text("\n".join(rows) + "\n")
    data = {"train": str(folder / "train.jsonl"), "validation": str(folder / "validation.jsonl"), "max_length": 32}
    values = TINY | {"tokenizer": {"source": str(folder / "tokenizer")}, "data": data}
    options = {"name": "language_modeling", "messages": "messages"} if "name" not in task else {}
    return load(None, [], values | {"task": options | {"chat_template": template} | task})


def prepared(run: Run) -> Prepared:
    return prepare(run, find("tasks", run.task.name))


def judged(tokenizer: PreTrainedTokenizerFast, template: str) -> tuple[list[list[int]], list[list[int]]]:
    """Return tokens and masks of the training conversations, from transformers alone."""
    asked = {"chat_template": template, "return_dict": True, "return_assistant_tokens_mask": True}
    rendered = [tokenizer.apply_chat_template(messages, **asked) for messages in TALKS * 3]
    return [list(one["input_ids"]) for one in rendered], [list(one["assistant_masks"]) for one in rendered]


@pytest.mark.parametrize("together", [True, False])
def test_packed_conversations_have_no_separator(
    tokenizer: PreTrainedTokenizerFast, together: bool, tmp_path: Path
) -> None:
    run = run_of(
        tmp_path,
        tokenizer,
        MARKED,
        packing=True,
        block_size=7,
        **({} if together else {"attend_across_documents": False}),
    )
    columns = Columns(prepared(run).splits["train"])
    ids, masks = judged(tokenizer, MARKED)
    stream, learned = [token for each in ids for token in each], [mark for each in masks for mark in each]
    blocks = [(columns.ragged("input_ids").row(n), columns.ragged("targets").row(n)) for n in range(len(columns))]
    places = [place for place in range(0, len(stream) - 1, 7) if any(learned[place + 1 : place + 8])]
    assert [block.tolist() for block, _ in blocks] == [stream[p : min(p + 7, len(stream) - 1)] for p in places]
    wanted = [token if mark else IGNORED for token, mark in zip(stream, learned, strict=True)]
    firsts = set(np.cumsum([len(each) for each in ids]).tolist()) if not together else set()
    wanted = [IGNORED if place in firsts else token for place, token in enumerate(wanted)]
    assert [targets.tolist() for _, targets in blocks] == [wanted[p + 1 : p + 8] for p in places]


def test_a_truncated_conversation_has_no_end_token(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    columns = Columns(prepared(run_of(tmp_path, tokenizer, MARKED, packing=False, block_size=15)).splits["train"])
    ids, masks = judged(tokenizer, MARKED)
    assert max(len(each) for each in ids) > 16 > min(len(each) for each in ids)
    assert len(columns) == len(ids)
    for row, (tokens, mask) in enumerate(zip(ids, masks, strict=True)):
        assert columns.ragged("input_ids").row(row).tolist() == tokens[:-1][:15]
        wanted = [token if mark else IGNORED for token, mark in zip(tokens, mask, strict=True)][1:]
        assert columns.ragged("targets").row(row).tolist() == wanted[:15]


def test_a_long_answer_of_a_pair_is_truncated(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    task = {"name": "preference", "prompt": "prompt", "conversations": True}
    run = run_of(tmp_path, tokenizer, CHATML, **task)
    run = run.model_copy(update={"data": run.data.model_copy(update={"max_length": 25})})
    columns = Columns(prepared(run).splits["train"])
    for row, messages in enumerate(TALKS * 3):
        tokens = tokenizer.apply_chat_template(messages, chat_template=CHATML, return_dict=False)
        chosen = int(columns.flat("chosen")[row])
        assert columns.ragged("input_ids").row(row).tolist()[:chosen] == tokens[:25]
    assert len(tokenizer.apply_chat_template(TALK, chat_template=CHATML, return_dict=False)) > 25


ENDED = CHATML.replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_end|>' }}")  # the generation prompt ends a turn


OTHER = CHATML.replace("<|im_end|>", "<|im_start|>")  # a turn ends with a token that is not eos, as in Gemma's template


@pytest.mark.parametrize("template", [CHATML, ENDED, OTHER])
def test_predict_prompts_with_the_rendered_template(
    tokenizer: PreTrainedTokenizerFast, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt equals the template's tokens, even if they end with an end token, which is removed only from raw text.
    The template's end token ends the answer, too."""
    asked: list[list[int]] = []
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", *["<|im_start|>"] * (template == OTHER)])

    def generate(model: Any, inputs: Any, how: Any) -> torch.Tensor:
        asked.append(inputs["input_ids"][0].tolist())
        assert how.ends == ends
        return torch.zeros(1, 1, dtype=torch.long)

    monkeypatch.setattr(inference, "by_transformers", generate)
    monkeypatch.setitem(tokenizer._special_tokens_map, "pad_token", "[UNK]")
    user = [{"role": "user", "content": "one two"}]
    writing = Writing("messages", template)
    list(inference.continuations(None, tokenizer, [("one two",)], writing, 40, 4))
    rendered = tokenizer.apply_chat_template(
        user, chat_template=template, add_generation_prompt=True, return_dict=False
    )
    assert asked == [rendered]


@pytest.mark.parametrize("task", [{}, {"name": "preference", "prompt": "prompt", "conversations": True}])
def test_generate_of_the_export_stops_where_samples_stop(
    task: dict[str, Any], tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    size = {} if "name" in task else {"block_size": 24}
    end, other = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|im_start|>"])
    for template, ends in ((CHATML, end), (OTHER, [end, other])):
        folder = tmp_path / ("other" if template == OTHER else "usual")
        folder.mkdir()
        run = run_of(folder, tokenizer, template, **size, **task)
        trained = make_task(Job.of(run).with_data())
        model: Any = trained.model()
        trained.write(folder / "export", model.state_dict())
        assert GenerationConfig.from_pretrained(folder / "export").eos_token_id == ends
    model.generation_config.eos_token_id = [7, other, end]  # as in instruct models
    building.stop_at(model, ends)
    assert model.generation_config.eos_token_id == [7, other, end]


@pytest.mark.parametrize(
    "task",
    [{}, {"turns": "per_turn"}, {"name": "preference", "prompt": "prompt", "conversations": True}],
)
def test_a_template_that_writes_no_end_token_is_noted(
    task: dict[str, Any], tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    size = {} if "name" in task else {"block_size": 24}
    notes = warnings(prepared(run_of(tmp_path, tokenizer, NO_END, **size, **task)).facts)
    assert any("no trained answer contains the end token ('<|im_end|>')" in note for note in notes)
    notes = warnings(prepared(run_of(tmp_path, tokenizer, CHATML, **size, **task)).facts)
    assert not any("end token" in note for note in notes)
    notes = warnings(prepared(run_of(tmp_path, tokenizer, OTHER, **size, **task)).facts)
    assert any("ends an answer by '<|im_start|>', not by the end token ('<|im_end|>')" in note for note in notes)
    assert not any("does not learn to stop" in note for note in notes)


def test_an_end_token_outside_generation_blocks_is_no_target(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    template = MARKED.replace(
        "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}",
        "{{ m['content'] }}{% endgeneration %}{{ '<|im_end|>' + '\n' }}",
    )
    assert template != MARKED
    notes = warnings(prepared(run_of(tmp_path, tokenizer, template, block_size=24)).facts)
    assert any("does not learn to stop" in note for note in notes)


def test_each_end_token_ends_a_row_that_is_decoded_by_forward() -> None:
    """Every row generates 5, 6, 7: one stops at its own end token, all stop at the other."""
    how = inference.Decoding(3, 0, 5, turn_end=6)

    def forward(inputs: Any) -> torch.Tensor:
        ids = inputs["input_ids"]
        return torch.nn.functional.one_hot(ids + 1, 9).float()

    rows = inference.by_forward(forward, lambda left: left, {"input_ids": torch.tensor([[4], [5]])}, how)
    assert rows.tolist() == [[5, 0, 0], [6, 0, 0]]
