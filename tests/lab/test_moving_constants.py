"""`lockstep init --from`: constants of a file beside the script, and members of the script's own enumerations."""

from pathlib import Path

from lockstep.lab.import_config.constant_files import constants
from lockstep.lab.import_config.script import Script, Unknown
from support.moving_scripts import changed, moved

FILE = '"""Settings."""\nimport os\nLR = 2 * 1e-4\nSIZE: int = 4\nWHOLE = SIZE * 2\nNAMES = ["a", "b"]\n'
KIND = "import enum\nclass Kind(BASES):\n    linear = 'linear'\n    fast = 'cosine'\nMORE\n"


def value(text: str, path: str = "train.py", **options: object) -> object:
    script = Script(Path(path), text, options)
    return script.known(script.tree.body[-1].value, Unknown)  # type: ignore[attr-defined]


def test_constants_of_a_file_beside_the_script_are_read(here: Path) -> None:
    Path("settings.py").write_text(FILE)
    Path("package").mkdir()
    Path("package/settings.py").write_text(FILE)
    for text in (
        "from settings import LR, WHOLE\nHERE = [LR, WHOLE]",
        "from settings import LR as rate, WHOLE\nHERE = [rate, WHOLE]",
        "from package.settings import LR, WHOLE\nHERE = [LR, WHOLE]",
        "from .settings import LR, WHOLE\nHERE = [LR, WHOLE]",
        "import settings\nHERE = [settings.LR, settings.WHOLE]",
        "import settings as s\nHERE = [s.LR, s.WHOLE]",
    ):
        assert value(text) == [2e-4, 8], text
    assert value("from settings import NAMES\nHERE = NAMES[1]") == "b"


def test_names_of_a_file_that_may_have_another_value_are_not_read(here: Path) -> None:
    Path("settings.py").write_text(FILE)
    for text in (
        "from settings import LR\nif unknown():\n    LR = 1\nHERE = LR",
        "from settings import NAMES\nNAMES[1] = 'c'\nHERE = NAMES[1]",
        "import settings\nsettings.LR = 1\nHERE = settings.LR",
        "import settings\nother = settings\nother.LR = 1\nHERE = settings.LR",
        "import settings\nsetattr(settings, 'LR', 1)\nHERE = settings.LR",
        "import settings\nsettings.NAMES.append('c')\nHERE = settings.NAMES[1]",
        "import settings\ndef run(settings):\n    return settings.LR\nHERE = settings.LR",
        "from settings import *\nHERE = LR",
        "from settings import LR, missing\nHERE = LR",
        "from elsewhere import LR\nHERE = LR",
    ):
        assert value(text) is Unknown, text
    for more in (
        "LR = 1",
        "if os.environ.get('BIG'):\n    SIZE = 8",
        "SIZE += 1",
        "def tune():\n    global LR\n    LR = 1",
        "import torch",
        "RATE = float(os.environ['RATE'])",
        "NAMES.append('c')",
        "__all__ = ['SIZE']",
        "this is no code",
    ):
        Path("settings.py").write_text(FILE + more + "\n")
        assert constants(Path("settings.py")) is None, more
        assert value("from settings import LR\nHERE = LR") is Unknown, more


def test_a_loop_with_constants_of_a_file_becomes_a_run_file(here: Path) -> None:
    Path("constants.py").write_text("EPOCHS = 5\nSIZES = {'train': 24}\nRATE = 4e-5\n")
    text = changed(
        ("import torch\n", "import torch\nfrom constants import EPOCHS, RATE, SIZES\n"),
        ("range(3)", "range(EPOCHS)"),
        ("batch_size=8", "batch_size=SIZES['train']"),
        ("lr=2e-5", "lr=RATE"),
    )
    run = moved("train.py", text, "task.text=text", "launch.processes=1", "--partial")
    assert (run.epochs, run.batch_size, run.optim.learning_rate) == (5, 24, 4e-5)


def test_members_of_enumerations_have_their_values(here: Path) -> None:
    for bases in ("enum.Enum", "str, enum.Enum", "enum.StrEnum"):
        text = KIND.replace("BASES", bases)
        for code, known in (
            ("Kind.fast.value", "cosine"),
            ("Kind.fast.name", "fast"),
            ("Kind.fast == Kind.linear", False),
            ("Kind.fast.value == 'cosine'", True),
            ("Kind.fast == 'cosine'", Unknown if bases == "enum.Enum" else True),
            ("Kind.fast in ('cosine', 'x')", Unknown if bases == "enum.Enum" else True),
        ):
            assert value(f"{text.replace('MORE', '')}here = {code}\n") == known, (bases, code)
        for more in (
            "    @classmethod\n    def _missing_(cls, v):\n        return cls.linear",
            "Kind.fast = Kind.linear",
        ):
            assert value(f"{text.replace('MORE', more)}here = Kind.fast.value\n") is Unknown, more
    own = KIND.replace("BASES", "str, enum.Enum").replace("Kind", "KindType").replace("MORE", "")
    assert value(f"{own}here = KindType.fast\n") == "cosine"  # and not its name, as of a library's enumeration
    assert value("text = 'a'\nhere = text.value\n") is Unknown


def test_an_option_may_be_a_member_of_an_enumeration() -> None:
    text = KIND.replace("BASES", "str, enum.Enum").replace("MORE", "import argparse")
    text += "parser = argparse.ArgumentParser()\n"
    text += "parser.add_argument('--kind', type=Kind, default=Kind.fast, choices=list(Kind))\n"
    text += "args = parser.parse_args()\nhere = args.kind.value\n"
    assert value(text) == "cosine"
    assert value(text, kind="linear") == "linear"
