"""`lockstep init --from`: functions of windows and of tags are compared as a whole, on rows that are tried."""

import ast
from pathlib import Path

import pytest

from lockstep.lab.import_config import followed, tried_on_rows
from lockstep.lab.import_config.script import Script
from lockstep.lab.import_config.text_columns import Column
from support.moving_scripts import QUESTIONS, TAGS, changed

OTHER_WINDOWS = {  # a change of a function of windows -> whether its positions are others
    ("first += 1\n        last", "first += 2\n        last"): True,
    ('len(answer["text"][0])', 'len(answer["text"][0].strip())'): True,
    ("owners[i]", "i"): True,
    ("last = len(which) - 1", "last = first"): True,
    ("> begin or", "> begin and"): True,
    ("<= begin", "< begin"): True,
    (">= stop", "> stop"): True,
    ("starts.append(first - 1)", "starts.append(first)"): True,
    ('tokens["end_positions"] = ends', 'tokens["end_positions"] = starts'): True,
    ('tokens["start_positions"]', 'tokens["input_ids"][0][0] = 7\n    tokens["start_positions"]'): True,
    ('rows["answers"][owners[i]]', 'rows["answers"][::-1][owners[i]]'): True,
    ('"][0]\n', '"][-1]\n'): True,
    ("asked = [text.strip() for", "asked = [text.lower() for"): True,
    ("while first <= last", "import os\n            while first <= last"): True,
    ("for i, spans in enumerate(offsets):", "for i in range(len(offsets)):\n        spans = offsets[i]"): False,
    ("first <= last and spans[first][0] <= begin", "not (first > last or begin < spans[first][0])"): False,
}


def test_windows_are_those_that_lockstep_makes_of_the_same_rows(tmp_path: Path) -> None:
    def differs(text: str) -> bool:
        script = Script(tmp_path / "train.py", text)
        columns = ("question", "context", "answers")
        return tried_on_rows.other_windows(script, script.functions["windows"], columns)[0] is not None

    assert not differs(QUESTIONS)
    assert {pair: differs(changed(pair, text=QUESTIONS)) for pair in OTHER_WINDOWS} == OTHER_WINDOWS


OTHER_TAGS = {
    ("batch_index=i", "batch_index=0"): True,
    ('out["labels"] = labels', 'out["labels"] = labels[::-1]'): True,
    ("labels.append(row)", "labels.append(row[::-1])"): True,
    ("row.append(-100)\n            elif", "row.append(0)\n            elif"): True,
    ("            previous = word", "        previous = word"): True,
    ("is_split_into_words=True)", "is_split_into_words=True)\n    out['input_ids'] = 1"): True,
    ("enumerate(rows", "enumerate(rows['tokens'] and rows"): False,
}


def test_tags_are_those_that_lockstep_gives_the_same_rows(tmp_path: Path) -> None:
    def differs(text: str) -> bool:
        script = Script(tmp_path / "train.py", text)
        function = script.functions["tokens"]
        return tried_on_rows.other_tags(script, function, "tokens", lambda node: node.id == "ids") is not None

    assert not differs(TAGS)
    assert {pair: differs(changed(pair, text=TAGS)) for pair in OTHER_TAGS} == OTHER_TAGS


PAIRS = """
tokenizer = AutoTokenizer.from_pretrained("acme/encoder")
prefix = "translate: "
ids = {"no": 0, "yes": 1}

def pairs(rows):
    out = tokenizer(rows["first"], rows["second"], truncation=True)
    out["labels"] = [ids[each] for each in rows["answer"]]
    return out

def single(row):
    return tokenizer(row["first"], text_pair=row["second"], max_length=32)

def translated(rows):
    sources = [prefix + each["en"] for each in rows["translation"]]
    targets = [each["fr"] for each in rows["translation"]]
    out = tokenizer(sources, max_length=32)
    labels = tokenizer(text_target=targets, max_length=32)
    out["labels"] = [[(t if t != tokenizer.pad_token_id else -100) for t in ids] for ids in labels["input_ids"]]
    return out
"""
OTHER_TEXTS = {  # a change of a function of texts -> the function
    ('rows["first"], rows["second"]', 'rows["second"], rows["first"]'): "pairs",
    ('rows["first"], r', '[text.strip() for text in rows["first"]], r'): "pairs",
    ('in rows["answer"]]', 'in rows["answer"]][::-1]'): "pairs",
    ("return out\n\ndef single", "out['input_ids'][0] = out['input_ids'][1]\n    return out\n\ndef single"): "pairs",
    ('row["first"], text', 'row["first"].lower(), text'): "single",
    ('prefix + each["en"]', 'prefix + each["en"].strip()'): "translated",
    ('[each["fr"] for', '[each["en"] for'): "translated",
    ("t in ids]", "t in ids[1:]]"): "translated",
    ('each in rows["translation"]]\n    out', 'each in rows["translation"][::-1]]\n    out'): "translated",
    (
        "return out\n\ndef single",
        "out['token_type_ids'] = out['attention_mask']\n    return out\n\ndef single",
    ): "pairs",
}


def test_texts_and_labels_equal_those_of_the_columns(tmp_path: Path) -> None:
    def differing(text: str) -> list[str]:
        script = Script(tmp_path / "train.py", text)
        both = {"text": Column("first"), "text_pair": Column("second")}
        of = {"text": Column("translation", "translate: ", "en"), "text_target": Column("translation", "", "fr")}
        columns = {"pairs": both, "single": both, "translated": of}
        tried = {
            name: tried_on_rows.other_texts(
                script, script.functions[name], of, name != "single", lambda n: n.id == "ids"
            )
            for name, of in columns.items()
        }
        return [name for name, node in tried.items() if node is not None]

    assert differing(PAIRS) == []
    for pair, name in OTHER_TEXTS.items():
        assert differing(changed(pair, text=PAIRS)) == [name], pair


@pytest.mark.parametrize(
    "body", ["while True: pass", "return f(x)", "return range(10**9)", "return [0] * 10**9", "return x.__class__"]
)
def test_endless_or_unknown_functions_are_not_followed(body: str) -> None:
    function = ast.parse(f"def f(x):\n    {body}").body[0]
    with pytest.raises((followed.NotFollowed, RecursionError)):
        followed.FollowedFunction(lambda node: 0, {"f": function}).call(function, [[1]])
