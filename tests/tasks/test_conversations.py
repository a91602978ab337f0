"""Conversations by a chat template: only what the assistant says is learned, whatever the template rewrites, and what a
block cannot hold is counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lockstep.cli import main
from lockstep.config.run import Run, load
from lockstep.data.batch import IGNORED
from lockstep.data.conversations import Writing, documents_of, rendered, turns, without_nulls
from lockstep.data.job import Job
from lockstep.data.prepare import warnings
from lockstep.tasks.language_modeling import LanguageModeling
from support.harness import run_on
from support.messages import raises
from support.task_runs import GPT2, TASKS, make, trained, write

PLAIN = str(TASKS["messages"]["task"]["chat_template"])
# As those of reasoning models do: what an earlier turn thought is left out once another turn follows.
THINKING = (
    "{% for m in messages %}<{{ m.role }}> "
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1].strip() }}"
    "{% else %}{{ m.content }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% if quick %}<think> </think> {% endif %}{% endif %}"
)
CALLS = (
    "{% if tools %}<tools> {% for t in tools %}{{ t.name }}:{{ t | tojson }} {% endfor %}{{ '\\n' }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}> {{ m.content }}"
    "{% if 'tool_calls' in m %}{% for c in m.tool_calls %} call {{ c.name }} {{ c.arguments | tojson }}{% endfor %}"
    "{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)


@pytest.fixture(scope="module")
def tok() -> Any:
    """A token a word or sign, and nothing else."""
    inner = Tokenizer(models.WordLevel({"[UNK]": 0, "[PAD]": 1}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", pad_token="[PAD]")


def said(*texts: str) -> list[dict[str, Any]]:
    """User, assistant, user, assistant, ..."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def learned(tok: Any, messages: list[dict], offered: Any = None, **how: Any) -> list[tuple[str, list[str]]]:
    """Each document, and what of it is learned."""
    found = rendered(tok, messages, offered, Writing("messages", **{"template": PLAIN} | how), 3)
    return [(each.text, [each.text[begin:end] for begin, end in each.spans]) for each in found]


# -- where the assistant speaks --------------------------------------------------------------------------------------


def test_every_turn_of_a_conversation_is_learned(tok: Any) -> None:
    ((text, parts),) = learned(tok, said("a", "b c", "d", "e"))
    assert text == "<user> a\n<assistant> b c\n<user> d\n<assistant> e\n"
    assert parts == ["b c\n", "e\n"]


def test_a_template_that_rewrites_is_refused_with_the_turn(tok: Any) -> None:
    thought = said("a", "<think> x </think> b", "c", "<think> y </think> d")
    with raises("LS2045", "row 3", "1"):
        learned(tok, thought, template=THINKING)
    assert learned(tok, thought[:2], template=THINKING)[0][1] == ["<think> x </think> b\n"]  # of one turn nothing is
    assert learned(tok, said("a", "b", "c", "d"), template=THINKING)[0][1] == ["b\n", "d\n"]  # nor where none thinks


def test_each_turn_is_learned_as_it_is_written_when_it_is_the_last(tok: Any) -> None:
    thought = said("a", "<think> x </think> b", "c", "<think> y </think> d")
    first, second = learned(tok, thought, template=THINKING, each=True)
    assert first == ("<user> a\n<assistant> <think> x </think> b\n", ["<think> x </think> b\n"])
    assert second == (
        "<user> a\n<assistant> b\n<user> c\n<assistant> <think> y </think> d\n",
        ["<think> y </think> d\n"],
    )
    assert learned(tok, thought, each=True)[1][1] == ["<think> y </think> d\n"]  # also where nothing is rewritten


def test_generation_prompt_must_begin_the_turn(tok: Any) -> None:
    how: dict[str, Any] = {"template": THINKING, "arguments": {"quick": True}, "each": True}
    with raises("LS2044", "1", "<think>"):
        learned(tok, said("a", "b"), **how)
    ((_, parts),) = learned(tok, said("a", "<think> </think> b"), **how)
    assert parts == ["b\n"]  # what it is asked with is not learned


def test_tools_tool_calls_and_consecutive_turns(tok: Any) -> None:
    """In a table, each message has the keys of all messages."""
    empty = {"content": None, "tool_calls": None, "name": None}
    call = {"name": "add", "arguments": {"a": 1, "b": None}}
    messages = [
        empty | {"role": "user", "content": "sum"},
        empty | {"role": "assistant", "tool_calls": [call, {"name": "log", "arguments": {"a": None, "b": "x"}}]},
        empty | {"role": "tool", "name": "add", "content": "3"},
        empty | {"role": "assistant", "content": "it is"},
        empty | {"role": "assistant", "content": "3"},
    ]
    tools = [{"name": "add", "parameters": None}, {"name": "log", "parameters": {"b": "string"}}]
    for offered in (tools, json.dumps(without_nulls(tools))):
        ((text, parts),) = learned(tok, messages, offered, template=CALLS, tools="tools")
        assert text.startswith(
            '<tools> add:{"name": "add"} log:{"name": "log", "parameters": {"b": "string"}} \n<user>'
        )
        assert parts == [' call add {"a": 1} call log {"b": "x"}\n', "it is\n", "3\n"]
    assert turns(messages) == len(learned(tok, messages, template=CALLS, each=True)) == 3
    assert learned(tok, messages, None, template=CALLS)[0][0].startswith("<user> sum\n")


@pytest.mark.parametrize(
    ("messages", "how", "code", "value"),
    [
        (said("a", "b"), {"template": "{{ oops() }}"}, "LS2042", "row 3"),
        (said("a", "b")[1:], {}, "LS2043", "row 3, message 0 (assistant)"),
        (said("a", "b"), {"tools": "t", "offered": "[{"}, "LS2046", "column 't' of row 3"),
        (said("a", "b"), {"tools": "t", "offered": {"a": 1}}, "LS2047", "column 't'"),
        (said("a", "b"), {"tools": "t", "offered": "[1]"}, "LS2047", "column 't'"),
    ],
)
def test_conversations_that_a_template_cannot_render_are_refused(
    tok: Any, messages: list, how: dict, code: str, value: str
) -> None:
    with raises(code, value):
        learned(tok, messages, how.pop("offered", None), **how)


# -- a whole data set ------------------------------------------------------------------------------------------------


def chats(folder: Path, rows: list[dict], *overrides: str, **task: Any) -> Run:
    folder.mkdir(parents=True, exist_ok=True)
    for split, some in (("train", rows), ("validation", rows[:4])):
        write(folder / f"{split}.jsonl", some)
    values = {
        "task": {"name": "language_modeling", "messages": "messages", "chat_template": PLAIN, "block_size": 48} | task,
        "data": {"source": str(folder), "decontaminate": False},
        "model": GPT2,
        "tokenizer": {"train": "wordlevel", "vocab_size": 300},
        "output": str(folder / "out"),
        "batch_size": 8,
        "micro_batches": 2,
        "steps": 2,
        "launch": {"device": "cpu", "threads": 1, "processes": 1},
    }
    return load(None, list(overrides), values)


def task_of(run: Run) -> LanguageModeling:
    return LanguageModeling(run).opened(Job.of(run).with_data().data)


def targets(task: LanguageModeling, split: str = "train") -> list[str]:
    columns = task.splits[split]
    rows = (columns.ragged("targets").row(i) for i in range(len(columns)))
    return [task.tokenizer.decode(row[row != IGNORED], skip_special_tokens=True) for row in rows]


THOUGHTS = [
    {"messages": said(f"a{i}", f"<think> x{i} </think> b{i}", "c", f"<think> y{i} </think> d{i}")} for i in range(9)
]


def test_per_turn_examples_allow_templates_that_rewrite_earlier_turns(tmp_path: Path) -> None:
    with raises("LS2045", "row 0", "1"):
        task_of(chats(tmp_path, THOUGHTS, chat_template=THINKING))
    task = task_of(chats(tmp_path, THOUGHTS, chat_template=THINKING, turns="per_turn"))
    found = [text.split() for text in targets(task)]
    assert len(found) == 2 * len(THOUGHTS)
    for i in range(len(THOUGHTS)):
        assert [word for word in found[2 * i] if word[-1].isdigit()] == [f"x{i}", f"b{i}"]
        assert [word for word in found[2 * i + 1] if word[-1].isdigit()] == [f"y{i}", f"d{i}"]
    inputs = task.tokenizer.decode(task.splits["train"].ragged("input_ids").row(1))
    assert "b0" in inputs  # read, and no more than that
    assert "x0" not in inputs
    assert "cut_texts" not in task.prepared.facts


def test_keys_of_messages_and_tools_reach_the_template(tmp_path: Path) -> None:
    called = {"role": "assistant", "tool_calls": [{"name": "add", "arguments": {"a": 1}}]}
    rows = [{"messages": [*said("sum"), called], "tools": [{"name": "add"}]}] * 3
    words = '< tools > : user assistant call add name { " a " : 1 }'  # that the tokenizer learns
    rows += [{"messages": said(words, "world"), "tools": None}] * 3
    task = task_of(chats(tmp_path, rows, chat_template=CALLS, tools="tools"))
    assert [" ".join(text.split()) for text in targets(task)] == ['call add { " a " : 1 }'] * 3 + ["world"] * 3
    assert "tools > add" in task.tokenizer.decode(task.splits["train"].ragged("input_ids").row(0))
    with raises("LS2312", "task.tools", "'functions'"):
        task_of(chats(tmp_path, rows, chat_template=CALLS, tools="functions"))


def test_a_conversation_without_an_answer_counts_as_missing(tmp_path: Path) -> None:
    rows = [{"messages": said("a", "b")}] * 4 + [
        {"messages": said("a")},
        {"messages": [{"role": "user", "content": None}]},
    ]
    with raises("LS2323", "task.messages", "2", "6", "4"):
        task_of(chats(tmp_path, rows))
    task = task_of(chats(tmp_path, rows, "data.drop_missing=true"))
    assert len(task.splits["train"]) == 4
    assert task.prepared.facts["left_out"] == {"train": 2}


# -- what a block does not hold --------------------------------------------------------------------------------------


def test_truncated_conversations_are_counted_and_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`< user > a < assistant > b ...`: 7 tokens, and the words of the answer between."""
    rows = [{"messages": said("a", " ".join(["b"] * count))} for count in (1, 10, 11, 15)]
    rows.append({"messages": said(" ".join(["a"] * 20), "b")})
    run = chats(tmp_path, rows, block_size=16)
    assert run.task.options["block_size"] == 16
    task = task_of(run)
    columns = task.splits["train"]
    assert columns.flat("left")[:].tolist() == [0, 0, 1, 5]  # of the last one nothing to learn is left
    assert [len(text.split()) for text in targets(task)] == [1, 10, 10, 10]
    told = {"texts": 2, "tokens": 6, "nothing": 1, "of": 5, "most": 16, "key": "task.block_size"}
    assert task.prepared.facts["cut_texts"]["train"] == told
    (train, _, *_) = warnings(task.prepared.facts)
    assert train.startswith(
        "2 of 5 train texts are longer than 16 tokens and are truncated (6 tokens are lost); 1 more"
    )
    (tmp_path / "run.yaml").write_text(run.dump())
    assert main(["plan", str(tmp_path / "run.yaml")]) == 0
    assert train[:60] in " ".join(capfd.readouterr().out.split())
    again = task_of(run)  # from the cache
    assert again.prepared.facts["cut_texts"] == task.prepared.facts["cut_texts"]
    assert "cut_texts" not in task_of(chats(tmp_path, rows, block_size=48)).prepared.facts
    assert (
        "cut_texts" not in task_of(chats(tmp_path, rows, block_size=16, packing=True)).prepared.facts
    )  # nothing is lost


@pytest.mark.parametrize("key", ["chat_template='x'", "template_arguments={a: 1}", "tools=t", "turns=per_turn"])
def test_keys_of_conversations_need_some(key: str, tmp_path: Path) -> None:
    with raises("LS3052", str(key.partition("=")[0])):
        chats(tmp_path, [], f"task.{key}", "task.messages=null", *(["task.chat_template=null"] * ("x" not in key)))


@pytest.mark.processes
def test_the_same_bits_with_each_turn_an_example(tmp_path: Path) -> None:
    words = ("task.turns=per_turn", f"task.chat_template={json.dumps(THINKING)}")
    alone = run_on(1, trained, make(tmp_path, "messages", "strategy.name=single", *words))[0]
    for name in ("ddp", "fsdp2"):
        first, other = run_on(2, trained, make(tmp_path, "messages", f"strategy.name={name}", *words))
        assert {k: first[k] for k in ("digest", "loss", "norm", "scores")} == {
            k: alone[k] for k in ("digest", "loss", "norm", "scores")
        }
        assert other["loss"] == first["loss"]


def test_no_character_before_an_answer_is_learned() -> None:
    """With one token per character, exactly the assistant's words and the template's text after them are learned."""
    inner = Tokenizer(models.WordLevel({"[UNK]": 0, "[END]": 1}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    characters = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", eos_token="[END]")
    dialogue = said("hm?", "yes, no", "and?", "ok")
    found = list(
        documents_of(
            Dataset.from_list([{"messages": dialogue}]), characters, Writing("messages", template=PLAIN), range(1)
        )
    )
    ((documents, rows),) = found
    text = "<user> hm?\n<assistant> yes, no\n<user> and?\n<assistant> ok\n"
    assert rows == 1
    assert len(documents) == len(text)
    parts = [text[place] for place in np.flatnonzero(documents.scored)]
    assert "".join(parts) == "yes, no\nok\n"
