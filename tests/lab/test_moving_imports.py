"""`lockstep init --from`: what a script imports, names that have no value, seeds that are set while it trains."""

from pathlib import Path

import pytest

from support.moving_scripts import ACCELERATE, DDP, LOOP, MODE, SCRIPT, TRAINER, changed, in_loop, moved, refused

BY_SEED = "in lockstep the order and dropout of each epoch follow from seed"


def test_a_seed_that_is_set_while_training_is_refused_or_said() -> None:
    batch, epoch = "        loss = model", LOOP
    for code in (
        *(
            "torch.cuda.manual_seed(epoch)",
            "torch.cuda.manual_seed_all(0)",
            "torch.random.manual_seed(i)",
            "torch.seed()",
        ),
        *("torch.cuda.set_rng_state(state)", "numpy.random.seed(0)", "random.seed(0)", "generator.manual_seed(0)"),
    ):
        text = changed(
            (batch, f"        {code}\n{batch}"), (epoch, f"import numpy, random\nstate = generator = 0\n{epoch}")
        )
        assert f"{code} (it sets a seed" in in_loop(text), code
    for code in ("fix(epoch)", "set_seed(3)"):
        own = f"def fix(seed):\n    torch.cuda.manual_seed(seed)\nset_seed = fix\n{epoch}"
        assert f"{code} (" in in_loop(changed((MODE, f"    {code}\n{MODE}"), (epoch, own))), code
    code = "torch.cuda.manual_seed(7 + epoch)"  # each epoch has its own order: said, and not refused
    assert in_loop(changed((MODE, f"    {code}\n{MODE}"))).endswith(f"line 26: {code}: {BY_SEED}")
    scored = TRAINER.replace("ARGUMENTS", "").replace("    return {", "    np.random.seed(0)\n    return {")
    assert "np.random.seed(0) (it changes the training from compute_metrics)" in in_loop(scored)


def test_names_without_a_value_are_refused() -> None:
    plain = in_loop(SCRIPT)
    for pair in (
        ("batch_size=8,", "batch_size=8, num_workers=WORKERS,"),
        ('from_pretrained("encoder")\nopt', 'from_pretrained("encoder", num_labels=COUNT)\nopt'),
        (MODE, f"    HOOK\n{MODE}"),
        ("print(right)", "print(count)"),
        ("import torch\n", "import argparse\nimport torch\nargs = argparse.ArgumentParser().parse_args(WORDS)\n"),
    ):
        assert "(nothing in the script imports, defines or assigns it there" in in_loop(changed(pair)), pair
    inner = "def other():\n    inner = 3\n\n\nprint(inner)\n"  # the name of another function
    assert ": inner (nothing" in in_loop(SCRIPT + inner)
    for line in (
        "print(__file__, __name__)",
        "def f(x, *y, **z):\n    return [x for x in y], lambda k: k, z",
        "class C:\n    a = 1\n    b = a",
    ):
        assert in_loop(f"{SCRIPT}{line}\n") == plain, line
    assert (
        in_loop(SCRIPT.replace(LOOP, f"def late():\n    global later\n    later = 3\n\n\nlate()\nprint(later)\n{LOOP}"))
        == plain
    )


UNKNOWN = "no file beside the script and no library that init knows has this name"


@pytest.mark.parametrize("text", [TRAINER.replace("ARGUMENTS", ""), ACCELERATE])
def test_an_import_of_an_unknown_module_is_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plain = in_loop(text)
    for line in ("import patcher", "from patcher import *", "from . import patcher", "import patches.all as np2"):
        assert f"{line} ({UNKNOWN}" in in_loop(f"try:\n    {line}\nexcept ImportError:\n    pass\n{text}"), line
    assert in_loop(f"import wandb, seaborn as sns\nfrom dotenv import load_dotenv\n{text}").count("\n") == plain.count(
        "\n"
    )
    assert "line 1: import unsloth: it changes torch or transformers" in in_loop(f"import unsloth\n{text}")


def test_what_the_import_of_a_file_does_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plain = in_loop(SCRIPT)
    quiet = '"""Helpers."""\nimport logging\nimport torch\nlog = logging.getLogger(__name__)\nLIMIT = 3\n'
    quiet += "def f(x):\n    x.y = 1\n"
    Path("patcher.py").write_text(quiet + "if __name__ == '__main__':\n    torch.optim.AdamW = None\n")
    assert in_loop(f"import patcher\n{SCRIPT}").count("\n") == plain.count("\n")
    for code in (
        *(
            "torch.optim.AdamW = torch.optim.SGD",
            "torch.nn.Linear.forward = f",
            "setattr(torch.optim, 'AdamW', f)",
            "f(torch.optim)",
        ),
        *(
            "import transformers\ntransformers.utils.patch()",
            "import other",
            "class C:\n    torch.optim.AdamW = f",
            "exec('x')",
        ),
        *(
            "torch.set_default_dtype(torch.float64)",
            "@torch.library.register\ndef g():\n    pass",
            "torch.manual_seed = f",
            "import inner",
        ),
    ):
        Path("patcher.py").write_text(f"{quiet}{code}\n")
        Path("inner.py").write_text("import torch\ntorch.optim.AdamW = None\n")
        assert "importing it runs" in in_loop(f"import patcher\n{SCRIPT}"), code
    Path("torch.py").write_text("")
    assert "torch.py is imported in place of the library torch" in in_loop(SCRIPT)


def test_words_that_a_script_parses_and_does_not_show_are_no_default(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main, parse = ("def main():", "def main(argv=None):"), ("parse_args()", "parse_args(argv)")
    start = '__main__":\n    main('
    assert moved("loop.py", changed(main, parse, text=DDP)).optim.learning_rate == 0.01
    assert (
        moved(
            "loop.py",
            changed(
                main, parse, (start, f"{start}sys.argv[1:]"), ("import torch\n", "import sys\nimport torch\n"), text=DDP
            ),
        ).epochs
        == 4
    )
    Path("moved.yaml").unlink()
    for pairs in (
        (main, parse, (start, f"{start}['--lr', '3']")),
        (main, parse, (start, f"{start}argv=['--lr', '3']")),
        (("def main():", "def main(argv=('--lr', '3')):"), parse),
        (("def main():", "def main(*argv):"), parse, (start, f"{start}'--lr', '3'")),
        (("import torch\n", "import sys\nimport torch\nsys.argv[1:] = ['--lr', '3']\n"),),
        (("import torch\n", "import torch\nfrom sys import path as argv\n"), parse),
    ):
        assert "lr=args.lr" in refused("loop.py", changed(*pairs, text=DDP), capsys), pairs
