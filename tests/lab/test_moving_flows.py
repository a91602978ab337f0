"""`lockstep init --from`: objects of a training that leave the expressions which are followed, each with its line."""

import re
from pathlib import Path

import pytest
from transformers import BertTokenizerFast, DataCollatorForSeq2Seq

from lockstep.lab.import_config import import_config
from lockstep.lab.import_config.script import Script
from lockstep.lab.import_config.table import RunDraft
from support.moving_scripts import AFTER, SCRIPT, changed
from support.trainer_variants import COLLATOR, METRICS, SETS, TRAINED, TRAINS, TUNED

TEXT = TRAINED.replace("import numpy", "import torch\nimport numpy", 1)


def _deciding(text: str) -> list[str]:
    draft = RunDraft(by_hand={"data.max_length": 64})
    import_config.script(Script(Path("train.py"), text)).move(draft, 1)
    for each in draft.at_end:
        each(draft)
    return list(map(str, draft.deciding()))


def _unnamed(text: str, place: str, codes: tuple[str, ...]) -> list[str]:
    """Return those of the statements put before a place of a script that no gap names by a line."""
    indent = place[: len(place) - len(place.lstrip())]
    block = "".join(f"{indent}{line}\n" for code in codes for line in code.splitlines())
    lines = _deciding(changed((place, f"{block}{place}"), text=text))
    named = {int(number) for line in lines for number in re.findall(r"line (\d+):", line)}
    first, silent = text[: text.index(place)].count("\n") + 1, []
    for code in codes:
        last = first + code.count("\n")
        silent += [] if named & set(range(first, last + 1)) else [code]
        first = last + 1
    return silent


OF_TRAINERS = (
    "dict(m=model).get('m').half()",
    "boxed = {}\nboxed['m'] = model",
    "listed = []\nlisted.append(model)",
    "rows = {}\nrows['d'] = data",
    "for key, part in dict(d=data).items():\n    part['train']._data = None",
    "names = (lambda: model)",
    "class Kept:\n    m = model",
    "import contextlib\nwith contextlib.nullcontext(model) as again:\n    again.to(torch.float16)",
    "import functools\nhalf = functools.partial(torch.nn.Module.half, model)",
    "from types import SimpleNamespace\nspace = SimpleNamespace(t=tokenizer)",
    "class Box:\n    def __init__(self, m):\n        self.m = m\nbox = Box(model)",
    "getattr(model, 'ha' + 'lf')()",
    "import operator\noperator.methodcaller('half')(model)",
    "named = globals()['model']",
    "exec('model.half()')",
    "model.__dict__['training'] = False",
    "torch.nn.Module.__getattribute__(model, 'half')()",
    "chosen = max([model], key=id)",
    "import importlib\nimportlib.import_module('torch').use_deterministic_algorithms(True)",
    "import torch.nn.functional as F\nF.__dict__.update(dropout=print)",
    "import weakref\nseen = weakref.ref(model)",
)
OF_ADAPTERS = (
    "pairs = [peft_config]",
    "held = (tokenizer,)",
    "more = []\nmore.append(args)",
    "vars(peft_config)['r'] = 1",
)
OF_LOOPS = (
    "        [model][0].to(torch.float16)",
    "        parts = dict(o=optimizer)",
    "        groups = list(optimizer.param_groups)",
    "        again = (loss, loss)[0]\n        again *= 2",
    "        other = loss\n        other *= 2",
    "        for part in (model,):\n            part.float()",
    "        getattr(optimizer, 'st' + 'ep')()",
    "        import itertools\n        next(itertools.cycle([model])).float()",
)


def test_an_object_of_the_training_is_followed_or_refused_with_its_line() -> None:
    assert not _unnamed(TEXT, SETS, OF_TRAINERS)
    assert not _unnamed(TUNED, "trainer = SFT", OF_ADAPTERS)
    loops = tuple("\n".join(line[8:] for line in code.splitlines()) for code in OF_LOOPS)
    assert not _unnamed(SCRIPT, "        loss.backward()\n", loops)


READ = (  # in one script: nothing of it is refused
    "core = getattr(model, 'module', model)\nprint(type(core).__name__, model.__class__.__name__)",
    "parts = [data['train'], data['validation']]\nprint([len(part) for part in parts])",
    "for name, part in {'a': data['train'], 'b': data['validation']}.items():\n    print(name, len(part))",
    "import functools\nsay = functools.partial(print, flush=True)\nsay('x', len(data))",
    "from contextlib import suppress\nwith suppress(ImportError):\n    import wandb",
    "history = {'loss': []}\nhistory['loss'].append(1.0)",
    "import copy\nprint(copy.deepcopy(model))",
    "dtype = getattr(torch, 'float' + '32')\nprint(dtype, 'x' in globals())",
)
AFTER_TRAINING = (
    "def report(t):\n    print(t.state.log_history)\n    t.save_model('x')\nreport(trainer)",
    "merged = trainer.model.merge_and_unload()\nmerged.save_pretrained('merged')",
    "results = {'trainer': trainer}",
)
LOADED = "tokenizer = AutoTokenizer.from_pretrained(NAME)\n"
TRIED = (
    "try:\n    tokenizer = AutoTokenizer.from_pretrained(NAME)\nexcept OSError:\n    tokenizer = AutoTokenizer.OTHER\n"
)


def test_code_that_only_reads_an_object_is_no_gap() -> None:
    text = changed((SETS, "\n".join((*READ, SETS))), (TRAINS, "\n".join((TRAINS, *AFTER_TRAINING))), text=TEXT)
    same = TRIED.replace("OTHER", "from_pretrained(NAME, force_download=True)")
    assert not _deciding(changed((LOADED, same), text=text))
    other = TRIED.replace("OTHER", "from_pretrained('acme/other')")
    assert any("it has the value of line" in line for line in _deciding(changed((LOADED, other), text=text)))
    logs = f"        history['loss'].append(loss.item())\n{AFTER}"
    assert not _deciding(changed(("for epoch in", "history = {'loss': []}\nfor epoch in"), (AFTER, logs), text=SCRIPT))


def test_names_of_labels_that_a_comprehension_computes_are_read() -> None:
    names = "labels = ['a', 'b', 'c', 'd', 'e']\n"
    for code in (
        "id2label={i: name for i, name in enumerate(labels)}",
        "label2id={name: i for i, name in enumerate(labels)}",
        "id2label=dict(enumerate(labels))",
        "id2label=dict(zip(range(5), labels))",
        "id2label={str(i): labels[i] for i in range(len(labels))}",
    ):
        draft = RunDraft(by_hand={"data.max_length": 64})
        text = changed(("model = Auto", f"{names}model = Auto"), ("num_labels=5", f"num_labels=5, {code}"), text=TEXT)
        import_config.script(Script(Path("train.py"), text)).move(draft, 1)
        known = draft.keys.get("task.label_names") == ["a", "b", "c", "d", "e"]
        assert known or "labels[i]" in code, (code, draft.keys.get("task.label_names"))
        assert known != bool([gap for gap in draft.deciding() if "label" in gap.name]), code
    assert Script(Path("x.py"), "x = {i: i for i in range(10**9)}").known is not None


RATE = "trainer.args.learning_rate = 1.0"
SCORES = {  # code -> the function that compute_metrics is
    f"class Scores:\n    def __call__(self, p):\n        {RATE}\n        return {{}}\n": "Scores()",
    f"def make(t):\n    def inner(p):\n        {RATE}\n        return {{}}\n    return inner\n": "make(1)",
    "def scores(p):\n    for m in [model]:\n        m.classifier = None\n    return {}\n": "scores",
    "def zeros(p):\n    trainer.model.classifier.weight.data.zero_()\n    return {}\n": "zeros",
    "table = {}\n": "table['scores']",
}


def test_a_function_that_a_trainer_is_given_is_followed_or_refused() -> None:
    for code, node in SCORES.items():
        text = changed((SETS, f"{code}{SETS}"), ("=compute_metrics,", f"={node},"), text=TEXT)
        assert _deciding(text), code
    quiet = "def make(t):\n    def inner(p):\n        return {'n': len(p.predictions)}\n    return inner\n"
    assert not _deciding(changed((SETS, f"{quiet}{SETS}"), ("=compute_metrics,", "=make(1),"), text=TEXT))
    assert METRICS in TEXT


def test_a_collator_of_sequences_fails_with_labels_of_a_classifier_and_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad"]))
    rows = [{"input_ids": [2, 5, 3], "labels": 1}, {"input_ids": [2, 3], "labels": 0}]
    with pytest.raises(TypeError):
        DataCollatorForSeq2Seq(BertTokenizerFast(str(tmp_path / "vocab.txt")))(rows)
    text = TEXT.replace("DataCollatorWithPadding", "DataCollatorForSeq2Seq")
    assert any("it pads labels as sequences" in line for line in _deciding(text))
    assert COLLATOR in TEXT
