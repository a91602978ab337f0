"""`lockstep init --from`: objects of a training are followed, and statements around them are on a closed list."""

import re
from pathlib import Path

import pytest
from transformers import BertTokenizerFast, DataCollatorForSeq2Seq

from lockstep.lab.import_config import import_config
from lockstep.lab.import_config.script import Script
from lockstep.lab.import_config.table import RunDraft
from support.moving_scripts import ACCELERATE, AFTER, SCRIPT, changed
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


LISTED = TRAINED.replace("import numpy", "import os, sys, types\nimport torch\nimport numpy", 1)
CLASS = "class Box:\n    def METHOD(self, *more):\n        model.classifier = None\n        return iter([])\n"
FREEZE = "def freeze(p, *more):\n    p.requires_grad = False\n    return 0\n"
REFUSED = (  # code before the settings
    "x = apply_something()",
    "eval('model.classifier.weight.data.zero_()')",
    "import importlib\nimportlib.import_module('patches')",
    "import gc\n[each.weight.data.zero_() for each in gc.get_objects() if hasattr(each, 'weight')]",
    "import unittest.mock as mock\nmock.patch.object(Trainer, 'compute_loss', f).start()",
    "if (part := model.config).hidden_dropout_prob:\n    part.hidden_dropout_prob = 0.0",
    "data |= {'train': data['validation']}",
    "class Own(metaclass=Meta):\n    pass",
    "sys.settrace(shake)",
    "from mine import patch\npatch()",
    "parts = [data['train']]\nparts[0].set_transform(lambda rows: rows)",
    "import copy\nother = copy.copy(model)\nother.classifier.weight.data.zero_()",
    "import contextlib\nwith contextlib.nullcontext(model) as other:\n    other.classifier = None",
    "try:\n    raise ValueError(model)\nexcept ValueError as error:\n    error.args[0].classifier = None",
    "match [model]:\n    case [other]:\n        other.classifier = None",
    "for index, weight in zip(range(3), model.parameters()):\n    weight.data = weight.data * 2",
    "vars(model)['training'] = False",
    "globals().get('model').classifier = None",
    "class Box:\n    part = model\nBox.part.classifier = None",
    f"{FREEZE}list(map(freeze, model.bert.parameters()))",
    f"{FREEZE}import functools\nfunctools.reduce(freeze, model.bert.parameters(), None)",
    "def change():\n    model.classifier = None\nother = change\nother()",
    "change = lambda: setattr(model, 'classifier', None)\nchange()",
    f"{CLASS.replace('METHOD', '__enter__')}with Box():\n    pass",
    f"{CLASS.replace('METHOD', '__iter__')}for each in Box():\n    pass",
    f"{CLASS.replace('def METHOD', '@property' + chr(10) + '    def one')}box = Box()\nbox.one",
    "def change(parts):\n    parts['m'].classifier.weight.data.zero_()\nchange({'m': model})",
    "def change(*parts):\n    parts[0].classifier.weight.data.zero_()\nchange(*[model])",
    "from datasets import Value\ndata = data.cast_column('labels', Value('float32'))",
    "data = data.cast(features)",
    "class Rows:\n    def __init__(self, d):\n        self.d = d\n    def swap(self):\n"
    "        self.d['train'] = self.d['validation']\nRows(data).swap()",
    "import tensorflow as tf\ntf.random.set_seed(3)",
)
QUIET = (
    "import logging\nlogger = logging.getLogger(__name__)\nlogger.info('start %s', 1)",
    "import wandb\nwandb.login()\nrun = wandb.init(project='x')\nfrom dotenv import load_dotenv\nload_dotenv()",
    "import mlflow\nmlflow.set_experiment('y')\nfrom huggingface_hub import login\nlogin(token=None)",
    "import pandas as pd\nframe = pd.DataFrame(data['train'][:100])\nframe['n'] = frame['labels']\n"
    "print(frame.groupby('labels').size())\nframe.to_csv('x.csv')",
    "import matplotlib.pyplot as plt\nfigure, axes = plt.subplots(2)\naxes[0].hist([len(x) for x in "
    "data['train']['review']])\nfor axis in axes:\n    axis.set_title('x')\nplt.show()",
    "from collections import Counter\ncounts = Counter(data['train']['labels'])\nprint(counts.most_common(3))",
    "small = [text for text in data['validation']['review'] if len(text) < 10]\nsmall.sort()\nprint(small[:2])",
    "if (n := len(data['train'])) < 100:\n    raise ValueError(f'too few rows: {n}')",
    "match NAME.split('/'):\n    case ['acme', name]:\n        print(name)",
    "show = lambda *more: print(*more, flush=True)\nshow('x', len(data))",
    "import hashlib\nprint(hashlib.md5(''.join(data['train']['review'][:9]).encode()).hexdigest())",
    "from contextlib import contextmanager\n@contextmanager\ndef timed(name):\n    yield\n    print(name)\n"
    "with timed('x'):\n    print('y')",
    "with torch.no_grad():\n    out = model(**tokenizer('hi', return_tensors='pt'))\nprint(out.logits.argmax(-1))",
    "lengths = np.array([len(tokenizer(text).input_ids) for text in data['train']['review']])\n"
    "print(np.percentile(lengths, [50, 95]), lengths.mean())",
    "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Paths:\n    out: str = 'out'\n"
    "paths = Paths()\nprint(paths.out)",
    "class Counts:\n    def __init__(self, d):\n        self.d, self.counts = d, 0\n        self.by_split = {}\n"
    "    def count(self):\n        for name in self.d:\n            self.by_split[name] = len(self.d[name])\n"
    "counts = Counts(data)\ncounts.count()\nprint(counts.by_split)",
    "raise SystemExit('executed')",
)


@pytest.mark.parametrize("code", REFUSED)
def test_unlisted_statements_are_refused_with_their_line(code: str) -> None:
    lines = _deciding(changed((SETS, f"{code}\n{SETS}"), text=LISTED))
    first = LISTED[: LISTED.index(SETS)].count("\n") + 1
    named = {int(number) for line in lines for number in re.findall(r"line (\d+): ", line)}
    assert named & set(range(first, first + code.count("\n") + 1)), lines


def test_statements_that_can_change_no_training_are_on_the_list() -> None:
    assert not _deciding(LISTED)
    for code in QUIET:
        assert not _deciding(changed((SETS, f"{code}\n{SETS}"), text=LISTED)), code


def test_contexts_around_training_are_checked() -> None:
    timer = (
        "class Timer:\n    def __enter__(self):\n        CODE\n    def __exit__(self, *more):\n        print('end')\n"
    )
    code = f"{timer}with Timer():\n    trainer.train()"
    assert not _deciding(changed((TRAINS, code.replace("CODE", "print('begin')")), text=LISTED))
    assert _deciding(changed((TRAINS, code.replace("CODE", "model.classifier = None")), text=LISTED))
    code = "import wandb\nwith wandb.init(project='x'):\n    trainer.train()"
    assert not _deciding(changed((TRAINS, code), text=LISTED))


def test_a_table_of_a_log_and_arguments_in_a_mapping_are_read() -> None:
    table = "import pandas as pd\ntable = pd.DataFrame(trainer.state.log_history)\ntable.to_csv('x.csv')"
    assert not _deciding(changed((TRAINS, f"{TRAINS}\n{table}"), text=LISTED))
    evaluated, collate = 'eval_dataset=data["validation"],', "data_collator=DataCollatorWithPadding(tokenizer)"
    for mapping in ("dict(eval_dataset=data['validation'])", "more"):
        code = f"more = dict(eval_dataset=data['validation'])\ntrainer = Trainer(**{mapping}, "
        assert not _deciding(changed((evaluated, ""), ("trainer = Trainer(", code), text=LISTED)), mapping
    code = f"more = dict({collate.partition('=')[0]}=own)\ntrainer = Trainer(**more, "
    assert _deciding(changed((f"{collate}, ", ""), ("trainer = Trainer(", code), text=LISTED))


def test_training_that_is_repeated_in_another_way_is_refused() -> None:
    for code in (
        "[trainer.train() for _ in range(2)]",
        "def go():\n    trainer.train()\ngo()\ngo()",
        "def go():\n    trainer.train()\nfor _ in range(3):\n    go()",
    ):
        assert any("it trains several times" in line for line in _deciding(changed((TRAINS, code), text=LISTED))), code


OBJECTS = {  # what is changed -> a part of the gap
    (METRICS, f"class DataCollatorWithPadding(DataCollatorWithPadding):\n    pass\n{METRICS}"): "data_collator=",
    ("DataCollatorWithPadding(tokenizer)", "DataCollatorWithPadding(other)"): "the line that loads other was not found",
    (
        "model = AutoModel",
        "AutoModelForSequenceClassification = Mine\nmodel = AutoModel",
    ): "replaced by the script, and not the library's",
    ("args=args", "args=args if args.local_rank else other"): "the line that creates them was not found",
    (
        METRICS,
        f"def decay():\n    for group in trainer.optimizer.param_groups:\n        group['lr'] *= 0.9\n{METRICS}",
        '    return {"accuracy"',
        '    decay()\n    return {"accuracy"',
    ): "it changes the training from compute_metrics",
}


def test_objects_of_a_trainer_equal_those_of_its_libraries() -> None:
    for pairs, part in OBJECTS.items():
        text = changed(*zip(pairs[::2], pairs[1::2], strict=True), text=LISTED)
        assert any(part in line for line in _deciding(text)), (pairs, _deciding(text))
    for code in ("vars(peft_config)['r'] = 2", "def change(config):\n    config.r = 1\nchange(peft_config)"):
        assert _deciding(changed(("args = SFT", f"{code}\nargs = SFT"), text=TUNED)), code


PREPARED = "model, optimizer, train, dev, schedule = accelerator.prepare(model, optimizer, train, dev, schedule)"
OF_LOADERS = (
    (PREPARED, PREPARED.replace("train, dev, schedule =", "dev, train, schedule =")),
    (PREPARED, f"a = accelerator.prepare({PREPARED.partition('(')[2]}\nmodel, optimizer, dev, train, schedule = a"),
    ("    for batch in train:", "    for train in (dev,):\n        pass\n    for batch in train:"),
)


def test_a_loop_over_another_loader_is_refused() -> None:
    assert not _deciding(ACCELERATE)
    for pair in OF_LOADERS:
        assert _deciding(changed(pair, text=ACCELERATE)), pair


def test_further_statements_beside_a_step_are_understood() -> None:
    step = "        optimizer.step()\n"
    assert not _deciding(SCRIPT)
    for code in (
        "        if (value := loss.item()) > 10:\n            print('high', value)\n",
        "        match i % 100:\n            case 0:\n                print(loss.item())\n",
        "        if torch.isnan(loss):\n            raise RuntimeError('not a number')\n",
    ):
        assert not _deciding(changed((step, f"{step}{code}"), text=SCRIPT)), code
    for code in (
        "        if (loss := loss * 2) > 10:\n            pass\n",
        "        match i:\n            case 0:\n                continue\n",
    ):
        backward = "        loss.backward()\n"
        assert _deciding(changed((backward, f"{code}{backward}"), text=SCRIPT)), code
