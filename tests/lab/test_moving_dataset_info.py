"""`lockstep init --from` for a file of LLaMA-Factory whose data set is described in dataset_info.json."""

import json
from pathlib import Path
from typing import Any

import pytest
from jinja2 import Template
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, PreTrainedTokenizerFast

from lockstep.config.plugins import find
from lockstep.config.run import load
from lockstep.data import tokenizer as tokenizers
from lockstep.data.arrow_cache import Columns
from lockstep.data.prepare import prepare
from support.messages import mentions
from support.moving_scripts import moved, refused

_FACTORY = "stage: sft\nmodel_name_or_path: a/b\ndataset: NAME\ntemplate: qwen\nfinetuning_type: full\n"


def test_dataset_info_of_llama_factory_is_read(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "data").mkdir()
    entries = {
        "talks": {"file_name": "t.jsonl", "formatting": "sharegpt", "columns": {"messages": "talk"}},
        "hub": {"hf_hub_url": "x/y", "subset": "z", "columns": {"prompt": "q", "response": "a"}},
        "joined": {"hf_hub_url": "x/y", "columns": {"prompt": "q", "query": "more"}},
    }
    (here / "data" / "dataset_info.json").write_text(json.dumps(entries))
    run = moved("lf.yaml", _FACTORY.replace("NAME", "talks"))
    assert (run.data.source, run.task.options["messages"]) == ("data/t.jsonl", "talk")
    run = moved("lf.yaml", _FACTORY.replace("NAME", "hub").replace("template: qwen\n", ""))
    assert (run.data.source, run.data.config) == ("x/y", "z")
    assert (run.task.options["prompt"], run.task.options["response"]) == ("q", "a")
    (here / "moved.yaml").unlink()
    assert "columns: query: more" in refused("lf.yaml", _FACTORY.replace("NAME", "joined"), capsys)
    assert "has no entry of that name" in refused("lf.yaml", _FACTORY.replace("NAME", "none"), capsys)


def test_messages_on_the_command_line_replace_the_columns_of_instructions(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = factory(here, {"file_name": "rows.json"}).replace("finetuning_type: full", "finetuning_type: lora")
    text = text.replace("a/b", "base")
    (here / "base").mkdir()
    (here / "base" / "config.json").write_text('{"model_type": "llama", "dtype": "float32"}')
    run = moved("lf.yaml", text, "task.messages=talk", "data.source=x/y")
    assert run.task.options["messages"] == "talk"
    assert not {key for key in ("prompt", "response") if run.task.options.get(key)}
    assert "replaced by task.messages: template: qwen" in capsys.readouterr().out
    assert run.model.dtype == "float32"  # not the default of an adapter, since its base is saved in it
    (here / "data" / "rows.json").write_text('[{"instruction": "a", "output": "b"}]')
    (here / "moved.yaml").unlink()
    assert "data/rows.json has no column 'talk'" in refused("lf.yaml", text, capsys, "task.messages=talk")


def test_an_input_column_without_text_is_ignored(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """LLaMA-Factory then uses the instruction alone as the prompt."""
    text = factory(here, {"file_name": "rows.json"}).replace("template: qwen\n", "")
    rows = [{"instruction": f"say {n}", "input": "", "output": "b"} for n in range(8)]
    (here / "data" / "rows.json").write_text(json.dumps(rows))
    run = moved("lf.yaml", text)
    assert (run.task.options["prompt"], run.task.options["response"]) == ("instruction", "output")
    assert "columns: query: input -> nothing: it is empty in every row" in capsys.readouterr().out
    (here / "moved.yaml").unlink()
    (here / "data" / "rows.json").write_text(json.dumps([*rows, rows[0] | {"input": "x"}]))
    assert "columns: query: input, by default" in refused("lf.yaml", text, capsys)
    for value in ("data.validation_fraction=0", "batch_size=0"):
        assert mentions(refused("lf.yaml", text, capsys, value), "LS1002", value.replace("=", ": invalid value "))


def test_a_tokenizer_without_a_chat_template_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = WordLevel({"<unk>": 0, "</s>": 1, "a": 2}, unk_token="<unk>")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="</s>").save_pretrained("base")
    LlamaConfig(vocab_size=3, hidden_size=8, intermediate_size=8, num_attention_heads=1).save_pretrained("base")
    text = factory(here, TALKS).replace("a/b", "base")
    talk = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "a a"}]
    (here / "data" / "t.jsonl").write_text(f"{json.dumps({'talk': talk})}\n" * 20)
    assert mentions(refused("lf.yaml", text, capsys), "LS3351", "task.messages", "task.chat_template")


OPENAI = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
TALKS = {"file_name": "t.jsonl", "formatting": "sharegpt", "columns": {"messages": "talk"}}
PAIRS = {"file_name": "p.jsonl", "formatting": "sharegpt", "ranking": True, "columns": {"messages": "talk"}}


def factory(here: Path, entry: dict[str, Any], stage: str = "sft") -> str:
    """Write a file of LLaMA-Factory, whose data set has this entry."""
    (here / "data").mkdir(exist_ok=True)
    (here / "data" / "dataset_info.json").write_text(json.dumps({"mine": entry}))
    return _FACTORY.replace("NAME", "mine").replace("sft", stage)


@pytest.mark.parametrize(
    ("entry", "columns"),
    [
        (TALKS | {"tags": OPENAI | {"system_tag": "system"}}, {"messages": "talk"}),
        (TALKS | {"formatting": "openai", "tags": OPENAI | {"system_tag": "system"}}, {"messages": "talk"}),
        (TALKS | {"tags": {"user_tag": "user", "assistant_tag": "bot"}}, {"messages": "talk"}),
        (TALKS | {"columns": {"messages": "m", "tools": "functions"}}, {"messages": "m", "tools": "functions"}),
        (TALKS | {"columns": None}, {"messages": "conversations"}),
    ],
)
def test_supported_tags_of_dataset_info_are_read(entry: dict[str, Any], columns: dict[str, str], here: Path) -> None:
    run = moved("lf.yaml", factory(here, entry))
    assert {key: run.task.options[key] for key in columns} == columns


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (TALKS | {"tags": OPENAI | {"role_tag": "speaker"}}, "tags: role_tag speaker, content_tag content"),
        (TALKS | {"tags": OPENAI | {"content_tag": "text"}}, "tags: role_tag role, content_tag text"),
        (TALKS | {"tags": OPENAI | {"user_tag": "customer"}}, "tags: user_tag: customer"),
        (TALKS | {"tags": {"assistant_tag": "agent"}}, "tags: assistant_tag: agent"),
        (TALKS | {"tags": {"user_tag": "gpt", "assistant_tag": "human"}}, "tags: user_tag: gpt"),
        (TALKS | {"tags": {"role_tag": "role", "content_tag": "content"}}, "tags: user_tag: human, by default"),
        (TALKS | {"tags": OPENAI | {"function_tag": "function"}}, "tags: function_tag: function"),
        (TALKS | {"tags": OPENAI | {"narrator_tag": "x"}}, "tags: narrator_tag: x"),
        (TALKS | {"columns": {"messages": "m", "system": "sys"}}, "columns: system: sys"),
        (TALKS | {"columns": {"messages": "m", "images": "i"}}, "columns: images: i"),
        (TALKS | {"formatting": "other"}, "formatting: other"),
        (PAIRS, "ranking: True"),
        ({"file_name": "a.json"}, "columns: query: input, by default"),
        ({"file_name": "a.json", "columns": {"prompt": "q", "kto_tag": "k"}}, "columns: kto_tag: k"),
    ],
)
def test_unsupported_entries_of_dataset_info_are_refused(
    entry: dict[str, Any], said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused("lf.yaml", factory(here, entry), capsys)


def test_pairs_in_conversations_of_dataset_info(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For `dpo` and `rm` with `formatting: sharegpt`, the prompt is the list of messages."""
    names = {"messages": "talk", "chosen": "good", "rejected": "bad"}
    for stage, task in (("dpo", "preference"), ("rm", "reward")):
        run = moved("lf.yaml", factory(here, PAIRS | {"columns": names}, stage))
        columns = {key: run.task.options[key] for key in ("prompt", "chosen", "rejected", "conversations")}
        assert columns == {"prompt": "talk", "chosen": "good", "rejected": "bad", "conversations": True}
        assert run.task.name == task
        (here / "moved.yaml").unlink()
    entry = PAIRS | {"tags": {"user_tag": "customer"}}
    assert "tags: user_tag: customer" in refused("lf.yaml", factory(here, entry, "dpo"), capsys)
    without = {key: value for key, value in PAIRS.items() if key != "ranking"}
    assert "ranking: False" in refused("lf.yaml", factory(here, without, "dpo"), capsys)


def test_pairs_in_conversations_are_trained_as_they_are_moved(here: Path) -> None:
    rows = [
        {
            "conversations": [{"from": "human", "value": f"what is {n} and {n + 1}"}],
            "chosen": {"from": "gpt", "value": f"it is {2 * n + 1}"},
            "rejected": {"from": "gpt", "value": "no idea"},
        }
        for n in range(40)
    ]
    (here / "data").mkdir()
    (here / "data" / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = moved("lf.yaml", factory(here, PAIRS | {"columns": None}, "dpo"))
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}"
    options = run.task.options | {"chat_template": template + "<assistant>{% endif %}"}
    values = {"model": {"type": "gpt2"}, "tokenizer": {"train": "bpe", "vocab_size": 300}, "data": {}}
    values["data"] = {"source": str(here / "data" / "p.jsonl"), "max_length": 64}
    run = load(None, [], values | {"task": {"name": "preference", **options}})
    prepared = prepare(run, find("tasks", "preference"))
    first = Columns(prepared.splits["train"]).ragged("input_ids").row(0)
    tokenizer = tokenizers.load(prepared.tokenizer)
    assert str(tokenizer.decode(first)).strip().startswith("<user>what is")


def test_chatml_becomes_a_template(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """axolotl and LLaMA-Factory use it in place of the tokenizer's own."""
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    text = factory(here, TALKS).replace("template: qwen", "template: chatml")
    axolotl = "base_model: a/b\nchat_template: chatml\nlearning_rate: 1e-4\nmicro_batch_size: 2\n"
    axolotl += "gradient_accumulation_steps: 1\nnum_epochs: 1\ndatasets: [{path: c/d, type: chat_template}]\n"
    for name, written in (("lf.yaml", text), ("ax.yaml", axolotl)):
        template = moved(name, written).task.options["chat_template"]
        rendered = Template(template).render(messages=talk, add_generation_prompt=True)
        answer = "<|im_start|>assistant\n"
        assert rendered == f"<|im_start|>user\na<|im_end|>\n{answer}b<|im_end|>\n{answer}"
    assert "no special tokens of the tokenizer" in " ".join(capsys.readouterr().out.split())
    moved("ax.yaml", axolotl, "task.chat_template=mine", "optim.warmup_steps=3")
    said = " ".join(capsys.readouterr().out.split())
    assert "special tokens" not in said  # nothing about keys that the command line replaces
    assert "rounds its warm-up" not in said
    (here / "moved.yaml").unlink()
    other = axolotl.replace("chatml", "llama3")
    assert "chat_template: llama3" in refused("ax.yaml", other, capsys)


def test_a_template_of_another_model_is_not_lost(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = factory(here, TALKS)
    for template, model, why in (
        ("default", "a/b", "not the template of the tokenizer"),
        ("vicuna", "a/b", "not the template of the tokenizer"),
        ("llama3", "Qwen/b", "not the template of the tokenizer"),
        ("qwen", "meta-llama/b", "not the template of the tokenizer"),
        ("qwen", "a/Qwen2-b", ""),
        ("llama3", "a/b", ""),
        ("deepseekr1", "a/DeepSeek-R1-Distill-Qwen-b", ""),
    ):
        own = text.replace("template: qwen", f"template: {template}").replace("a/b", model)
        if why:
            assert why in refused("lf.yaml", own, capsys), (template, model)
            moved("lf.yaml", own, "task.chat_template=mine")
        else:
            moved("lf.yaml", own)
        (here / "moved.yaml").unlink()
    moved("lf.yaml", text.replace("template: qwen", "template: chatml"))
    assert "eos_token <|im_end|>" in " ".join(capsys.readouterr().out.split())
