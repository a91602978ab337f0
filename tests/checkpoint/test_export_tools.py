"""An export used with the field's plain tools: the code on its card, its chat template, generation config, labels and
prompt prefix; and the command that a run suggests at its end."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.cli import main
from lockstep.config.run import load
from support.marks import long, slow
from support.task_runs import BERT, GPT2, TASKS, TEMPLATE, make, write

ONE = ("launch.processes=1", "strategy.name=single", "micro_batches=2", "steps=2", "batch_size=8")
TALK = [{"role": "user", "content": "the dog"}]
QUICK, LONG = ("messages", "summaries"), ("packed", "prompts", "talking rewards", "masked")
KINDS: dict[str, tuple[str, dict[str, Any]]] = {kind: (kind, {}) for kind in TASKS}
KINDS |= {
    "summaries": ("prompts", {"task": {"name": "summarization", "source": "question", "target": "answer",
                                       "prefix": "summarize: "}, "model": TASKS["translation"]["model"]}),
    "labels": ("masked", {"task": {"name": "classification"}, "model": BERT}),
    "talking pairs": ("preference", {"task": {"name": "preference", "conversations": True, "chat_template": TEMPLATE},
                                     "data": {"max_length": 90},
                                     "model": {**GPT2, "config": GPT2["config"] | {"n_positions": 96}}}),
    "talking rewards": ("reward", {"task": {"name": "reward", "conversations": True, "chat_template": TEMPLATE},
                                   "data": {"max_length": 60}}),
}  # fmt: skip


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exports")


def exported(here: Path, kind: str) -> Path:
    """The output folder of a small run."""
    source, changed = KINDS[kind]
    values = make(here, source, *ONE, count=40).model_dump(mode="json")
    if kind == "labels":
        for split in ("train", "validation"):
            path = here / source / f"{split}.jsonl"
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            write(path, [row | {"label": ("good", "bad", "so so")[i % 3]} for i, row in enumerate(lines)])
    for key, value in changed.items():
        values[key] = value if key != "data" else values[key] | value
    values["output"] = str(here / f"out-{kind.replace(' ', '-')}")
    (here / f"{kind}.yaml").write_text(load(None, [], values).dump())
    assert main(["train", str(here / f"{kind}.yaml")]) == 0
    return Path(values["output"])


@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else long(kind) if kind in LONG else slow(kind) for kind in KINDS]
)
def test_the_code_of_the_model_card_runs(kind: str, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    if kind == "pairs":
        pytest.importorskip("sentence_transformers")
    output = exported(here, kind)
    said = capfd.readouterr().out
    export = str(output / "export")
    card = (output / "export/README.md").read_text()
    [lines] = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    *before, last = lines.replace("PATH_OR_REPO", export).strip().splitlines()
    names: dict[str, Any] = {}
    exec("\n".join(before), names)  # as a reader of the card would run it
    found = eval(last, names)
    assert found is not None
    config, tok = AutoConfig.from_pretrained(export), AutoTokenizer.from_pretrained(export)
    assert config.pad_token_id == tok.pad_token_id
    if kind == "labels":
        assert {*config.label2id} == {"good", "bad", "so so"}
        assert found[0]["label"] in config.label2id
    if kind == "summaries":
        assert '"summarize: some text"' in card
    talks = kind in ("messages", "talking pairs", "talking rewards")
    if talks:
        assert tok.chat_template == TEMPLATE
        written = tok.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
        assert written == "<user> the dog\n<assistant> "
    if kind in ("packed", "documents", "prompts", "messages", "preference", "talking pairs"):
        assert GenerationConfig.from_pretrained(export).eos_token_id == tok.eos_token_id
        model = AutoModelForCausalLM.from_pretrained(export)
        text = written if talks else "the dog"
        ids = tok(text, return_tensors="pt")["input_ids"][:, :20]
        with torch.no_grad():
            model.get_output_embeddings().weight[tok.eos_token_id] += 100 * model.transformer(ids)[0][0, -1]
        assert model.generate(ids, max_new_tokens=9, do_sample=False)[0, ids.shape[1] :].tolist() == [tok.eos_token_id]
    check_next(said, kind, here)


def check_next(said: str, kind: str, here: Path) -> None:
    """Check that the command suggested at the end of a run works, and queries the model as a user would."""
    command = shlex.split(re.sub(r"\$'[^']+\\t[^']+'", "'a\tb'", said.rpartition("\nnext ")[2]).strip())
    assert command[0] == "lockstep"
    if kind in ("summaries", "messages"):
        sources = [json.loads(line) for line in (here / KINDS[kind][0] / "validation.jsonl").read_text().splitlines()]
        assert "summarize" not in command[3]
        assert "<user>" not in command[3]
        assert kind == "messages" or any(row["question"].startswith(command[3][:10]) for row in sources)
    assert main(command[1:]) == 0
