"""`lockstep init --from`: settings that are changed by another way to them, and modules cast by an alias."""

from pathlib import Path

import pytest

from lockstep.lab.import_config.script import Script, Unknown
from support.moving_scripts import moved, refused

CONFIG = "config = {'name': 'a', 'train': {'lr': 0.1}}\nHERE\nhere = config['train']['lr']\n"
PARSED = """
import argparse
import sys
def tune(options):
    options.lr = 1
def parse(words=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    MORE
    return parser.parse_args(WORDS)
args = parse()
HERE
here = args.lr
"""
OWN = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x)

class Meter:
    def __init__(self):
        self.reset()

    def reset(self):
        RESET

def build():
    return Net()

def rows():
    return TensorDataset(torch.randn(64, 4), torch.randint(2, (64,)))

def cast(module):
    return module.to(torch.float16)

if __name__ == "__main__":
    model = build()
    loader = DataLoader(rows(), batch_size=8, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    meter = Meter()
    model.train()
    HERE
    for epoch in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
"""


def value(text: str) -> object:
    script = Script(Path("train.py"), text)
    return script.known(script.tree.body[-1].value, Unknown)  # type: ignore[attr-defined]


def test_a_mapping_that_is_changed_by_its_parts_has_no_known_value() -> None:
    assert value(CONFIG.replace("HERE", "part = config['train']; print(part['lr'])")) == 0.1
    for text in (
        "part = config['train']; part['lr'] = 1",
        "part = config.get('train'); part.update(lr=1)",
        "config.get('train')['lr'] = 1",
        "list(config.values())[-1]['lr'] = 1",
        "for part in config.values():\n    part['lr'] = 1",
        "other = dict(config); other['train']['lr'] = 1",
        "del config['train']['lr']",
        "def tune(part):\n    part['lr'] = 1\ntune(config['train'])",
    ):
        assert value(CONFIG.replace("HERE", text)) is Unknown, text


def test_options_that_are_changed_in_another_way_have_no_known_value() -> None:
    def parsed(here: str = "", more: str = "pass", words: str = "words") -> object:
        return value(PARSED.replace("HERE", here).replace("MORE", more).replace("WORDS", words))

    second = "parser.add_argument('--rate', dest='lr', type=float, default=1.0)"
    assert parsed() == parsed(more="parser.set_defaults(seed=1)") == parsed(more=second) == 0.1
    for here in ("other = args; other.lr = 1", "given = vars(args); given['lr'] = 1", "d = args.__dict__; d['lr'] = 1"):
        assert parsed(here) is Unknown, here
    for more in ("parser.set_defaults(lr=1)", "parser.set_defaults(**found)", "sys.argv.append('--lr=1')"):
        assert parsed(more=more) is Unknown, more
    for words in ("None, space", "namespace=space"):
        assert parsed(words=words) is Unknown, words
    chosen = "class A:\n    lr = 0.1\nclass B:\n    lr = 1\nA = B\nhere = A.lr\n"
    assert value(chosen) is Unknown
    assert value(chosen.replace("A = B\n", "")) == 0.1


def test_values_are_followed_through_several_functions_and_an_object_of_settings() -> None:
    text = (
        "def build(size):\n    here = size\ndef run(config):\n    build(int(config['size']))\n"
        "def main():\n    config = {'size': 8}\n    run(config)\nmain()\n"
    )
    script = Script(Path("train.py"), text)
    assert script.known(script.functions["build"].body[0].value, Unknown) == 8  # type: ignore[union-attr,index]
    text = "@dataclass\nclass Settings:\n    lr: float = 0.1\ndef main(cfg):\n    HERE\n    here = cfg.lr\n"
    text += "main(Settings())\n"
    for here, known in (("pass", 0.1), ("cfg.lr = 1", Unknown)):
        script = Script(Path("train.py"), text.replace("HERE", here))
        assert script.known(script.functions["main"].body[-1].value, Unknown) == known  # type: ignore[union-attr,index]


def test_a_module_that_an_alias_casts_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = OWN.replace("RESET", "self.sum = 0")
    for cast in (
        "other = model; other.to(torch.float16)",
        "for other in [model]: other.to(dtype=torch.bfloat16)",
        "model = cast(model)",
        "kind = (torch.float64,); other = model; other.to(*kind)",
        "kind = torch.float16; (model,)[0].to(kind)",
    ):
        assert "on model, data or optimizer is unknown" in refused("train.py", text.replace("HERE", cast), capsys), cast
    text = OWN.replace("RESET", "model.half()").replace("HERE", "pass")
    assert "line 19: " in refused("train.py", text, capsys)
    text = OWN.replace("RESET", "self.sum = 0").replace("HERE", "model.to('cpu')")
    assert moved("train.py", text).batch_size == 8
