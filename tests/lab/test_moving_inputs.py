"""`lockstep init --from`: the inputs that a model receives, and how questions and contexts become windows."""

from pathlib import Path

import pytest

from support.messages import mentions
from support.moving_scripts import ACCELERATE, DDP, QUESTIONS, SCRIPT, TRAINER, USUAL, changed, moved, refused

CALL = "model(**batch).loss"
ALL = "input_ids=batch['input_ids'], attention_mask=batch['attention_mask'], token_type_ids=batch['token_type_ids']"
LABELS = "labels=batch['labels']"
ONE = ACCELERATE.replace('rows["first"], rows["second"]', 'rows["first"]')
BLOCKS = """
def blocks(rows):
    joined = {name: sum(parts, []) for name, parts in rows.items()}
    total_length = len(joined["input_ids"]) // 64 * 64
    return {name: [part[at : at + 64] for at in range(0, total_length, 64)] for name, part in joined.items()}

"""
LANGUAGE = (
    ACCELERATE.replace("SequenceClassification", "CausalLM")
    .replace('rows["first"], rows["second"]', 'rows["first"]')
    .replace("train = DataLoader", f"{BLOCKS}data = data.map(blocks, batched=True)\ntrain = DataLoader", 1)
)


def test_model_called_with_all_inputs_by_name(here: Path) -> None:
    assert moved("acc.py", ACCELERATE.replace(CALL, f"model({ALL}, {LABELS}).loss")).task.name == "classification"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (ONE.replace(CALL, f"model(input_ids=batch['input_ids'], {LABELS}).loss"), "does not pass attention_mask"),
        (
            ACCELERATE.replace(CALL, f"model({ALL.rpartition(',')[0]}, {LABELS}).loss"),
            "is not given token_type_ids, so both texts have one type",
        ),
        (
            ONE.replace("max_length=64)", "max_length=64, padding='max_length', return_attention_mask=False)"),
            "without passing attention_mask",
        ),
        (
            ONE.replace("max_length=64)", "max_length=64, padding=True)").replace(
                "train = DataLoader", "data = data.remove_columns(['attention_mask'])\ntrain = DataLoader"
            ),
            "without passing attention_mask",
        ),
        (
            ACCELERATE.replace(
                "train = DataLoader", "data.set_format('torch', ['input_ids', 'label'])\ntrain = DataLoader"
            ),
            "is not given token_type_ids",
        ),
        (ONE.replace("max_length=64)", "max_length=64, split_special_tokens=True)"), "split_special_tokens=True"),
        (
            ONE.replace("shuffle=True,", "shuffle=True, collate_fn=lambda rows: rows,"),
            "collate_fn=lambda rows: rows (lockstep builds",
        ),
        (
            LANGUAGE.replace("data = data.map(blocks, batched=True)\n", "").replace(
                CALL, "model(**batch, labels=batch['input_ids']).loss"
            ),
            "the script learns padding",
        ),
    ],
)
def test_an_input_that_a_model_is_not_given(
    text: str, wanted: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert wanted in refused("acc.py", text, capsys)


def test_models_without_padding_or_token_types_need_no_such_input(here: Path) -> None:
    named = f"model({ALL.rpartition(',')[0]}, {LABELS}).loss"
    assert moved("acc.py", ONE.replace(CALL, named)).task.options["text_pair"] is None
    other = ACCELERATE.replace(CALL, named).replace("acme/encoder", "acme/distilbert-small")
    assert moved("acc.py", other).task.options["text_pair"] == "second"
    text = LANGUAGE.replace(CALL, "model(input_ids=batch['input_ids'], labels=batch['input_ids']).loss")
    assert moved("acc.py", text).task.options["packing"] is True


def test_renamed_column_is_traced_to_the_data(here: Path) -> None:
    text = TRAINER.replace("ARGUMENTS", USUAL).replace('"small")', '"small").rename_column("body", "review")')
    assert moved("train.py", text).task.options["text"] == "body"


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        ("model = Auto", "model = wrap = Auto", ""),
        ("optimizer = torch", "model = model.to(torch.bfloat16)\noptimizer = torch", "model.dtype is the type"),
        ("optimizer = torch", "model.to('cuda', dtype=torch.float16)\noptimizer = torch", "model.dtype is the type"),
        ("optimizer = torch", "model = model.to('cuda')\noptimizer = torch", ""),
    ],
)
def test_weights_of_another_type(
    old: str, new: str, wanted: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = ACCELERATE.replace(old, new, 1)
    if wanted:
        assert wanted in refused("acc.py", text, capsys)
    else:
        moved("acc.py", text)


def test_an_own_module_of_another_type(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "task.model" in refused("points.py", DDP.replace("DDP(Net(32))", "DDP(Net(32).to(torch.bfloat16))"), capsys)


# -- precision and other models ----------------------------------------------------------------------------------------

OUT = "            out = model(x)\n"
CAST = '            with torch.autocast("cpu", dtype=torch.bfloat16MORE):\n                out = model(x)\n'


def test_the_precision_of_a_context(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = DDP.replace(OUT, CAST.replace("MORE", ""))
    assert moved("points.py", text).precision == "bf16"
    assert moved("points.py", DDP.replace(OUT, CAST.replace("MORE", ", enabled=False"))).precision == "fp32"
    held = '    cast = torch.autocast("cpu", dtype=torch.bfloat16)\n    for epoch'
    held = DDP.replace("    for epoch", held).replace(OUT, "            with cast:\n                out = model(x)\n")
    assert moved("points.py", held).precision == "bf16"
    scaled = text.replace("    for epoch", "    scaler = torch.amp.GradScaler('cpu')\n    for epoch")
    scaled = scaled.replace("loss.backward()", "scaler.scale(loss).backward()")
    scaled = scaled.replace("optimizer.step()", "scaler.step(optimizer)\n            scaler.update()")
    assert moved("points.py", scaled).precision == "bf16"
    (here / "moved.yaml").unlink()
    score = 'def score(model, x):\n    with torch.autocast("cpu", dtype=torch.bfloat16):\n        return model(x)\n\n\n'
    assert "its scope is unknown" in refused("points.py", DDP.replace("def main", f"{score}def main"), capsys)


def test_only_the_trained_model_in_evaluation_mode_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = DDP.replace("    for epoch", "    judge = Net(8)\n    judge.eval()\n    for epoch")
    assert moved("points.py", text).task.options["model"] == "points.Net"
    (here / "moved.yaml").unlink()
    assert "in evaluation mode" in refused("points.py", text.replace("judge.eval()", "model.eval()"), capsys)


def test_a_loop_that_was_not_gone_through_is_accused_of_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused("points.py", DDP.replace("for epoch in range(args.epochs)", "while going()"), capsys)
    assert "it decides whether and how long training runs" in said
    assert "no optimizer.step()" not in said


# -- questions ---------------------------------------------------------------------------------------------------------


def test_windows_of_questions_and_contexts(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = moved("qa.py", QUESTIONS)
    assert [run.task.options[key] for key in ("question", "context", "answers", "stride")] == [
        *("question", "context", "answers"),
        32,
    ]
    assert run.data.max_length == 128
    assert "batch_size counts questions" in capsys.readouterr().out
    other = QUESTIONS.replace('"context"', '"passage"').replace('rows["answers"]', 'rows["replies"]')
    run = moved("qa.py", other.replace(" stride=32,", ""))
    assert [run.task.options[key] for key in ("context", "answers", "stride")] == ["passage", "replies", 0]
    sided = QUESTIONS.replace("def windows", 'on_right = tokenizer.padding_side == "right"\n\ndef windows')
    sided = sided.replace(
        "    asked = [text.strip() for text in", '    rows["question"] = [text.lstrip() for text in'
    ).replace(
        'asked, rows["context"]',
        'rows["question" if on_right else "context"], rows["context" if on_right else "question"]',
    )
    sided = sided.replace('"only_second"', '"only_second" if on_right else "only_first"')
    sided = sided.replace("which[first] != 1", "which[first] != (1 if on_right else 0)")
    sided = sided.replace("        begin =", '        if len(answer["text"]) == 0:\n            pass\n        begin =')
    assert moved("qa.py", sided).task.options["stride"] == 32


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        ("text.strip() for", "text.lower() for", "text.lower()"),
        ('truncation="only_second"', "truncation=True", "the context alone is cut into windows"),
        ("\n        return_overflowing_tokens=True,", "", "the script truncates a context at the window"),
        ('["answer_start"][0]', '["answer_start"][-1]', "the first answer is learned"),
        ("starts.append(first - 1)", "starts.append(first)", "starts.append(first) (a position is"),
        ("ends.append(last + 1)", "ends.append(last - 1)", "ends.append(last - 1) (a position is"),
        ("starts.append(0)", "starts.append(-100)", "starts.append(-100)"),
        ("[0] > begin or", "[0] > stop or", "spans[first][0] > stop (lockstep's label of a window"),
        ('len(answer["text"][0])', 'len(answer["text"][0]) - 1', "< stop (lockstep's label of a window"),
        ("            starts.append(0)\n            ends.append(0)", "            continue", "continue (windows and"),
        (
            '    tokens["end_positions"]',
            '    tokens["input_ids"] = []\n    tokens["end_positions"]',
            "tokens['input_ids'] = []",
        ),
        ("    asked =", '    rows["context"] = [t[:99] for t in rows["context"]]\n    asked =', "texts are changed"),
    ],
)
def test_unsupported_windows_are_refused_with_their_line(
    old: str, new: str, wanted: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert old in QUESTIONS
    assert wanted in refused("qa.py", QUESTIONS.replace(old, new), capsys)


PADDING = "DataCollatorWithPadding(tokenizer)"
PLACE = "train = DataLoader"


def with_collator(code: str, body: str = "") -> str:
    """Return SCRIPT with its own collator, whose function has this body."""
    function = f"def collate(rows):\n    {body}\n\n\n" if body else ""
    return changed((PADDING, code), (PLACE, function + PLACE), text=SCRIPT)


@pytest.mark.parametrize(
    ("code", "body"),
    [
        ("lambda rows: tokenizer.pad(rows, return_tensors='pt')", ""),
        ("collate", "'Pad.'\n    return tokenizer.pad(rows, padding='longest', return_tensors='pt')"),
        ("collate", "batch = tokenizer.pad(rows, max_length=64, return_tensors='pt')\n    return batch"),
    ],
)
def test_a_collator_that_only_pads(code: str, body: str, here: Path) -> None:
    assert moved("loop.py", with_collator(code, body)).batch_size == 8


@pytest.mark.parametrize(
    ("code", "body"),
    [
        ("lambda rows: tokenizer.pad(rows[:4], return_tensors='pt')", ""),
        ("lambda rows: tokenizer.pad(rows, return_attention_mask=False, return_tensors='pt')", ""),
        ("lambda rows, k=4: tokenizer.pad(rows, return_tensors='pt')", ""),
        ("lambda rows: padder.pad(rows, return_tensors='pt')", ""),
        ("collate", "batch = tokenizer.pad(rows)\n    batch['labels'] = 1 - batch['labels']\n    return batch"),
        ("collate", "rows = [turned(row) for row in rows]\n    return tokenizer.pad(rows, return_tensors='pt')"),
    ],
)
def test_a_collator_that_does_more_than_pad_is_refused(
    code: str, body: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mentions(refused("loop.py", with_collator(code, body), capsys), "LS8209", "collate_fn=", "builds batches itself")
