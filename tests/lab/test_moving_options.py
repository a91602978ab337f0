"""`lockstep init --from`: options that are set after parsing, and loops that end before their last batch."""

import ast
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.config.run import RunError
from lockstep.lab.import_config.decided_branches import taken
from lockstep.lab.import_config.script import Script
from support.messages import mentions
from support.moving_scripts import ACCELERATE, DDP, moved, refused

STEP = "            optimizer.step()\n"
PARSED = "    args = parser.parse_args()\n"
GLUE = """
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, HfArgumentParser, Trainer, TrainingArguments

parser = HfArgumentParser(TrainingArguments)
settings = parser.parse_args_into_dataclasses()[0]
HERE
data = load_dataset("acme/reviews")
tokenizer = AutoTokenizer.from_pretrained("acme/encoder")
ids = {name: number for number, name in enumerate(names)}

def tokenize(rows):
    tokens = tokenizer(rows["review"], truncation=True, max_length=64)
    tokens["label"] = [ids[each] for each in rows["stars"]]
    return tokens

model = AutoModelForSequenceClassification.from_pretrained("acme/encoder", num_labels=5)
data = data.map(tokenize, batched=True)
Trainer(model=model, args=settings, train_dataset=data["train"], eval_dataset=data["validation"]).train()
"""


def replaced(text: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return text


def test_a_loop_that_ends_before_its_last_batch(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = "import argparse\n"
    stops = f"{before}import sys\n\ndef stop():\n    sys.exit()\n"
    for end in ("return", "sys.exit(0)", "raise SystemExit", "stop()", "break"):
        text = replaced(DDP, (before, stops), (STEP, f"{STEP}            if len(out) < 3:\n                {end}\n"))
        assert mentions(refused("loop.py", text, capsys), "LS8209", end), end
    text = replaced(DDP, (STEP, f"{STEP}        if epoch == 1:\n            return\n"))
    assert "line 50: return (the loop skips some" in refused("loop.py", text, capsys)
    stops = stops.replace("sys.exit()", 'sys.exit("nan")')
    text = replaced(DDP, (before, stops), (STEP, f"{STEP}            if torch.isnan(loss):\n                stop()\n"))
    shown = "        for i in range(9):\n            if i > 3:\n                break\n"
    assert moved("loop.py", text.replace(STEP, f"{STEP}{shown}")).epochs == 4


def test_an_option_without_a_default_is_no_default_of_trainer(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('--lr', type=float)\np.add_argument('--push')\n"
    )
    settings = "settings = TrainingArguments('out', learning_rate=p.parse_args().lr, hub_token=p.parse_args().push)\n"
    pairs = (
        ("parser = HfArgumentParser(TrainingArguments)\n", options),
        ("settings = parser.parse_args_into_dataclasses()[0]\nHERE\n", settings.replace("p.parse_args()", "args")),
    )
    text = replaced(GLUE, *pairs).replace("settings = T", "args = p.parse_args()\nsettings = T")
    text = text.replace("names)}", "['1', '2'])}")
    error = refused("train.py", text, capsys)
    assert mentions(error, "LS8209", "learning_rate=args.lr", "optim.learning_rate=...")
    assert "hub_token" not in error


def test_options_that_are_set_after_parsing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = "def read(parser):\n    own = parser.parse_args()\n    own.lr = 3.0\n    return own\n\n\ndef main():\n"
    cases = {
        "another name": replaced(DDP, ("def main():\n", named), (PARSED, "    args = read(parser)\n")),
        "setattr": replaced(DDP, (PARSED, f"{PARSED}    setattr(args, 'lr', 3.0)\n")),
        "vars": replaced(DDP, (PARSED, f"{PARSED}    vars(args)['lr'] = 3.0\n")),
        "a type": replaced(DDP, ("type=float, default=0.01", "type=lambda x: float(x) * 300, default='0.01'")),
        "words": replaced(DDP, (PARSED, "    args = parser.parse_args(words())\n")),
    }
    for name, text in cases.items():
        assert "lr=args.lr" in refused("loop.py", text, capsys), name
    assert moved("loop.py", replaced(DDP, ("default=0.01", "default='0.5'"))).optim.learning_rate == 0.5
    words = "parse_args(['--lr', '0.25', '--epochs=7'])"
    (here / "moved.yaml").unlink()
    run = moved("loop.py", replaced(DDP, ("parse_args()", words)))
    with pytest.raises(RunError):
        main(["init", "moved.yaml", "--force", "--from", "none.py", "--debug"])
    assert (run.optim.learning_rate, run.epochs) == (0.25, 7)


def test_parsed_settings_that_are_set_again(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = "python own.py --output_dir out --learning_rate 3e-5 --per_device_train_batch_size 8\n"

    def script(text: str) -> str:
        (here / "own.py").write_text(GLUE.replace("HERE", text))
        return command

    names = "names = sorted(['b', 'a'])"
    run = moved("run.sh", script(f"{names}\nsettings.learning_rate = 1e-4"))
    assert run.optim.learning_rate == 1e-4
    assert "ids numbers the labels" not in capsys.readouterr().out
    other = "settings = TrainingArguments('out', learning_rate=1.0) if names else settings"
    for text in ("settings = change(settings)", other, "setattr(settings, names[0], 1)"):
        (here / "moved.yaml").unlink(missing_ok=True)
        assert "settings" in refused("run.sh", script(f"{names}\n{text}"), capsys)
    moved("run.sh", script("names = load_dataset('acme/reviews')['train'].unique('stars')\nnames.sort(reverse=True)"))
    assert "ids numbers the labels; lockstep numbers them in sorted order" in capsys.readouterr().out


def test_a_total_of_another_loader_or_changed_later(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = replaced(ACCELERATE, ("len(train) * 3 // 4", "len(dev) * 3 // 4"))
    assert "counted in batches of dev, which is not the loader" in refused("loop.py", text, capsys)
    loop = "total = 3 * len(data)\nHERE\ndone = 0\nfor epoch in range(3):\n    for batch in data:\n        step()\n"
    loop += "        done += 1\n        if done >= total:\n            break\n"
    steps = loop.replace("3 * len(data)", "3 * steps").replace("HERE", "")
    steps = "steps = math.ceil(len(data) / 4)\n" + steps.replace(
        "done += 1", "if a.sync_gradients:\n            done += 1"
    )
    for every, left in ((4, False), (2, True)):
        body = f"a = Accelerator(gradient_accumulation_steps={every})\n{steps}".replace("\n", "\n    ")
        assert ("break" in ast.unparse(taken(Script(Path("own.py"), f"def main():\n    {body}")).tree)) == left
    changes = ("total -= 1", "data = data[:2]", "if x:\n    total = 7", "for i in x:\n    total = i", "")
    for change in changes:
        body = loop.replace("HERE", change).replace("\n", "\n    ")
        tree = taken(Script(Path("own.py"), f"import math\ndef main():\n    if True:\n        pass\n    {body}")).tree
        assert ("break" in ast.unparse(tree)) == bool(change), change


NEVER_COUNTED = """import math
def train():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    per_epoch = math.ceil(len(loader) / 2)
    total = 3 * per_epoch
    done = 0
    for epoch in range(3):
        for batch in loader:
            step(batch)
            if done >= total:
                break
"""


def test_a_counter_that_is_never_raised_keeps_its_break() -> None:
    script = Script(Path("train.py"), NEVER_COUNTED, {}, ast.parse(NEVER_COUNTED))
    assert "break" in ast.unparse(taken(script).tree)


COMMAND = """
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments
IMPORTS


DECORATED
def main(SPEC):
    data = load_dataset("acme/reviews")
    tokenizer = AutoTokenizer.from_pretrained(source)
    data = data.map(lambda rows: tokenizer(rows["text"], truncation=True, max_length=64), batched=True)
    model = AutoModelForSequenceClassification.from_pretrained(source)
    args = TrainingArguments(output_dir="o", learning_rate=rate, num_train_epochs=epochs)
    Trainer(model=model, args=args, train_dataset=data["train"]).train()
    INSIDE


if __name__ == "__main__":
    START
"""
OPTIONS = (
    "@click.command()\n@click.option('--source', '-s', default='acme/encoder', show_default=True)\n"
    "@click.option('--rate', type=float, default='1e-4')\n@click.option('--epochs', default=5, type=int, help='passes')"
)
TYPED = (
    "source: str = typer.Option('acme/encoder', help='model'), rate: float = 1e-4, epochs: int = typer.Option(5, '-n')"
)
PLAIN = "source='acme/encoder', rate=1e-4, epochs=5"
COMMANDS = (  # imports, decorators, arguments, the call that starts it
    ("import fire", "", PLAIN, "fire.Fire(main)"),
    ("from fire import Fire", "", PLAIN, "Fire(main)"),
    ("import typer", "", TYPED, "typer.run(main)"),
    ("import typer\napp = typer.Typer()", "@app.command()", TYPED, "app()"),
    ("import click", OPTIONS, "source, rate, epochs", "main()"),
)


def command(parts: tuple[str, ...], inside: str = "pass") -> str:
    text = COMMAND.replace("INSIDE", inside)
    for name, part in zip(("IMPORTS", "DECORATED", "SPEC", "START"), parts, strict=True):
        text = text.replace(name, part)
    return text


def test_options_of_fire_typer_and_click(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for parts in COMMANDS:
        run = moved("train.py", command(parts))
        assert (run.model.source, run.optim.learning_rate, run.epochs) == ("acme/encoder", 1e-4, 5), parts[3]
        Path("train.sh").write_text("python train.py --rate 3e-3\n")
        assert moved("train.sh", "python train.py --rate 3e-3\n").optim.learning_rate == 3e-3
        Path("moved.yaml").unlink()
        assert "rate_ (" in refused("train.py", command(parts, "rate_(model)"), capsys)  # its statements are read
    fire, _, run_, app, click = COMMANDS
    for parts in (  # the value is not that of the code
        (
            *run_[:2],
            "source: str = 'acme/encoder', epochs: int = 5, rate: float = typer.Option(1e-4, envvar='RATE')",
            run_[3],
        ),
        (*run_[:2], "source: str = 'acme/encoder', epochs: int = 5, rate: float = typer.Option(...)", run_[3]),
        (click[0], OPTIONS.replace("default='1e-4'", "required=True"), *click[2:]),
        (click[0], OPTIONS.replace("default='1e-4'", "default='1e-4', envvar='RATE'"), *click[2:]),
        (click[0], OPTIONS.replace("type=float", "callback=twice"), *click[2:]),
        (click[0], OPTIONS, "source, rate, epochs", "main(['--rate', '3'])"),
        (f"{app[0]}\n@app.callback()\ndef first():\n    pass", *app[1:]),
        (f"{app[0]}\n@app.command()\ndef other():\n    pass", *app[1:]),
        (*fire[:3], "fire.Fire(main, command=['--rate', '3'])"),
        (*fire[:3], "import sys\n    sys.argv += ['--rate', '3']\n    fire.Fire(main)"),
        ("import fire\nRATE = 1e-4", "", PLAIN.replace("1e-4", "RATE"), "RATE = 3\n    fire.Fire(main)"),
        (*run_[:2], TYPED.replace("typer.Option(5, '-n')", "typer.Option(50, max=10, clamp=True)"), run_[3]),
        (
            f"{run_[0]}\nfrom typing import Annotated",
            "",
            TYPED.replace("int = typer.Option(5, '-n')", "Annotated[int, typer.Option(envvar='N')] = 5"),
            run_[3],
        ),
        (
            f"{run_[0]}\nfrom typing import Annotated\nMany = Annotated[int, typer.Option(callback=twice)]",
            "",
            TYPED.replace("int = typer.Option(5, '-n')", "Many = 5"),
            run_[3],
        ),
        (click[0], OPTIONS.replace("type=int", "type=lambda x: 3 * int(x)"), *click[2:]),
        (click[0], OPTIONS.replace("type=int", "type=click.IntRange(1, 2, clamp=True)"), *click[2:]),
        (click[0], OPTIONS.replace("nd()", "nd(context_settings={'default_map': {'rate': 3}})"), *click[2:]),
        (click[0], f"{OPTIONS}\n@click.option('--learning', 'rate', default=3.0)", *click[2:]),
        (f"{app[0]}\nif True:\n    @app.command()\n    def other():\n        pass", *app[1:]),
        (f"{app[0]}\napp.registered_commands.clear()", *app[1:]),
        (*fire[:3], "fire.Fire({'train': main})"),
    ):
        assert "LS8209" in refused("train.py", command(parts), capsys), parts


def test_a_command_line_gives_values_by_flags_and_types(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, run_, _, click = COMMANDS
    spelled = (click[0], OPTIONS.replace("'--rate'", "'--lr', 'rate'").replace("5, type=int", "'5.0'"), *click[2:])
    Path("train.py").write_text(command(spelled).replace("=epochs", "=float(epochs)"))
    assert moved("train.sh", "python train.py --lr 3e-3\n").optim.learning_rate == 3e-3
    Path("moved.yaml").unlink()
    assert "--rate 3 (" in refused("train.sh", "python train.py --rate 3\n", capsys)
    typed = TYPED.replace("5, '-n'", "5, '--n-epochs'").replace("int =", "Annotated[int | None, 3] =")
    for text, epochs in ((TYPED.replace("5, '-n'", "5.9, '--n-epochs', max=9"), 7), (typed, None)):
        Path("train.py").write_text(command((*run_[:2], text, run_[3])))
        if epochs is not None:
            assert moved("train.sh", "python train.py --n-epochs 7\n").epochs == epochs
            assert moved("train.sh", "python train.py --rate 3\n").epochs == 5  # typer converts 5.9
            Path("moved.yaml").unlink()
        else:
            assert "num_train_epochs=epochs" in refused("train.sh", "python train.py --n-epochs 7\n", capsys)
