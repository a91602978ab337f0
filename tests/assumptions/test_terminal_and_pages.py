"""Assumptions about rich, jinja2, shtab and the chat templates of transformers."""

from __future__ import annotations

import argparse
import inspect
import io
import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from support.assumed import rests_on_it


class Screen(io.StringIO):
    """A stream that claims to be a terminal and records what is written."""

    def isatty(self) -> bool:
        return True


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


@rests_on_it("src/lockstep/track/console.py")
def test_rich_prints_text_unchanged_but_not_strings() -> None:
    r"""With soft_wrap, a console breaks no line, also on a terminal of 20 columns. It prints a Text, also a joined one,
    unchanged. It changes a str even after markup.escape: `FILE:100:` becomes an emoji, a backslash at the end is
    doubled, and the one of `\[1` is lost. A quiet console writes nothing, and `quiet` can be changed later."""
    from rich.console import Console
    from rich.markup import escape
    from rich.text import Text

    lines = [
        "[bold]x[/bold] [red] a[0] [/] \\[b] " + "word " * 20 + ".",
        "C:\\",
        "[/nothing]",
        "run.yaml:100: x",
        "\\[1",
    ]
    for terminal in (False, True):
        screen = Screen()
        console = Console(file=screen, width=20, highlight=False, soft_wrap=True, force_terminal=terminal, quiet=True)
        console.print("nothing")
        console.quiet = False
        for line in lines:
            console.print(Text("head", "bold") + Text(f" {line}"))
        assert plain(screen.getvalue()).split("\n")[:-1] == [f"head {line}" for line in lines]
        assert console.is_terminal is terminal
    console = Console(file=io.StringIO(), highlight=False, soft_wrap=True)
    for line in lines[3:]:
        console.print(escape(line))
    assert console.file.getvalue() == "run.yaml💯 x\n[1\n"  # type: ignore[attr-defined]


@rests_on_it("src/lockstep/track/console.py", "src/lockstep/track/busy.py")
def test_a_live_display_replaces_the_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """A started Live display replaces sys.stdout by a proxy whose `rich_proxied_file` is the original stream, writes to
    the `rich_proxied_file` of its console's file, and restores the stream at the end. It calls get_renderable at each
    refresh. show_cursor(True) shows the cursor again."""
    from rich.console import Console
    from rich.live import Live

    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)

    class Found(io.StringIO):
        rich_proxied_file = screen

    console = Console(file=Found(), force_terminal=True, width=30, legacy_windows=False, _environ={"TERM": "xterm"})
    assert console.is_interactive
    refreshes: list[str] = []

    def line() -> str:
        refreshes.append("")
        return f"line {len(refreshes)}"

    live = Live(console=console, get_renderable=line, transient=True, auto_refresh=False)
    live.start(refresh=True)
    assert sys.stdout is not screen
    assert getattr(sys.stdout, "rich_proxied_file") is screen  # noqa: B009
    before = len(refreshes)
    live.refresh()
    assert len(refreshes) > before
    console.show_cursor(True)
    assert screen.getvalue().endswith("\x1b[?25h")
    live.stop()
    assert sys.stdout is screen
    assert f"line {before}" in plain(screen.getvalue())


@rests_on_it("src/lockstep/track/console.py", "src/lockstep/track/busy.py")
def test_progress_renderables_and_cell_widths() -> None:
    """A Progress draws what its get_renderables yields, below its tasks. A wide character has two cells, and
    set_cell_size pads or cuts to a number of cells. Constrain and overflow="ellipsis" keep a text in one line of the
    given width. Measurement returns how wide a table would be without a limit."""
    from rich.cells import cell_len, set_cell_size
    from rich.console import Console
    from rich.constrain import Constrain
    from rich.measure import Measurement
    from rich.progress import Progress, TextColumn
    from rich.table import Table
    from rich.text import Text

    assert (cell_len("a"), cell_len("語"), cell_len("e\u0301")) == (1, 2, 1)
    assert (set_cell_size("ab", 4), set_cell_size("語語", 3), set_cell_size("abcd", 2)) == ("ab  ", "語 ", "ab")
    console = Console(file=io.StringIO(), width=20, force_terminal=False)

    class Bar(Progress):
        def get_renderables(self) -> Any:
            yield from super().get_renderables()
            yield Constrain(Text("x" * 50, no_wrap=True, overflow="ellipsis"), 10)

    bar = Bar(TextColumn("{task.description}"), console=console)
    row = bar.add_task("training", total=5, completed=2)
    bar.update(row, completed=4)
    assert bar.tasks[0].completed == 4
    bar.tasks[0].description = "step"
    console.print(*bar.get_renderables())
    assert [each.rstrip() for each in console.file.getvalue().split("\n")] == ["step", "xxxxxxxxx…", ""]  # type: ignore[attr-defined]
    table = Table()
    table.add_column("a")
    table.add_row("w " * 30)
    assert Measurement.get(console, console.options.update(width=1000), table).maximum > 60


@rests_on_it("src/lockstep/track/console.py", "src/lockstep/track/busy.py")
def test_tables_and_progress_columns_without_a_terminal() -> None:
    """Table.grid puts Spinner.render's text, a label and a ProgressBar in one line. Columns of a Progress show
    description without markup, bar, "3/10", "30%" and the time left, which is unknown at first. Title and headings of a
    Table are markup; columns[i].header is unchanged."""
    from rich import progress
    from rich.console import Console
    from rich.progress_bar import ProgressBar
    from rich.spinner import Spinner
    from rich.table import Table

    def drawn(*parts: Any) -> list[str]:
        console = Console(file=io.StringIO(), width=80, force_terminal=False, highlight=False)
        console.print(*parts)
        return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]

    line = Table.grid(padding=(0, 1))
    line.add_row(Spinner("dots").render(0.0), "label", ProgressBar(total=4, completed=2, width=20))
    assert drawn(line) == ["\u280b label " + "\u2501" * 10]
    kinds = (progress.BarColumn(4), progress.MofNCompleteColumn(), progress.TaskProgressColumn())
    bar = progress.Progress(
        progress.TextColumn("{task.description}", markup=False), *kinds, progress.TimeRemainingColumn()
    )
    bar.add_task("[x] a", total=10, completed=3)
    (text,) = drawn(*bar.get_renderables())
    assert text.split() == ["[x]", "a", "\u2501", "3/10", "30%", "-:--:--"]
    table = Table(title="[b]t", title_justify="left", title_style="bold")
    table.add_column("[i]a", justify="right")
    table.add_row("[red]1")
    assert (drawn(table)[0], table.columns[0].header) == ("t", "[i]a")
    assert [line for line in drawn(table) if "1" in line] == ["\u2502 1 \u2502"]


@rests_on_it("src/lockstep/lab/event_stream.py")
def test_a_display_of_a_notebook_can_be_updated() -> None:
    """IPython's display takes display_id, and its handle has `update`. Outside IPython get_ipython returns None."""
    display: Any = pytest.importorskip("IPython.display")
    import IPython

    assert IPython.get_ipython() is None  # type: ignore[no-untyped-call]
    assert callable(display.DisplayHandle.update)
    assert "display_id" in inspect.signature(display.display).parameters


@rests_on_it(
    "src/lockstep/track/report/report.py", "packages/lockstep-trace-report/src/lockstep_trace_report/__init__.py"
)
def test_jinja_escapes_what_finalize_returns_and_raises_for_unknown_names() -> None:
    """With autoescape, jinja2 escapes a value after `finalize`, in attributes too, but not a string marked safe.
    StrictUndefined raises UndefinedError for an unknown name or attribute. trim_blocks and lstrip_blocks leave no line
    of a block tag."""
    from jinja2 import DictLoader, Environment, StrictUndefined, UndefinedError

    pages = Environment(
        loader=DictLoader(
            {
                "a": "{% for x in rows %}\n {% if x %}\n<i t='{{ x }}'>{{ '<b>'|safe }}\n {% endif %}\n{% endfor %}\n",
                "b": "{{ nothing }}",
                "c": "{{ rows.nothing }}",
            }
        ),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: f"<{value}" if value == '"' else value,
    )
    assert pages.get_template("a").render(rows=['"', "&"]) == "<i t='&lt;&#34;'><b>\n<i t='&amp;'><b>\n"
    for name in "bc":
        with pytest.raises(UndefinedError):
            pages.get_template(name).render(rows=[])


def rendered(template: str, messages: list[dict] | None = None, **variables: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    texts: Any = render_jinja_template(
        conversations=[messages or [{"role": "user", "content": "hi"}]], chat_template=template, **variables
    )
    return str(texts[0][0])


@rests_on_it(
    "src/lockstep/data/conversations.py", "src/lockstep/data/tokenizer.py", "src/lockstep/tasks/answer_pairs.py"
)
def test_chat_templates_run_in_a_sandbox_and_have_these_names() -> None:
    """Chat templates run in jinja2's immutable sandbox, which raises if a template modifies a message or reads an
    attribute with underscores. They trim blocks, and have break and continue, raise_exception, strftime_now, and a
    tojson that escapes neither HTML nor letters. An unknown name is empty."""
    from jinja2.exceptions import SecurityError, TemplateError

    assert rendered("{% for m in messages %}\n  {{ m.content }}{% break %}\n{% endfor %}\n").strip() == "hi"
    assert rendered("{{ tools | tojson }}{{ unknown }}{{ eos_token }}", tools=[{"a": "<é>"}], eos_token="</s>") == (
        '[{"a": "<é>"}]</s>'
    )
    assert re.fullmatch(r"\d{4}", rendered("{{ strftime_now('%Y') }}"))
    for wrong in ("{{ messages.append(1) }}", "{{ messages.__class__.__mro__ }}"):
        with pytest.raises(SecurityError):
            rendered(wrong)
    with pytest.raises(TemplateError, match="no system"):
        rendered("{{ raise_exception('no system') }}")
    messages = [{"role": "user", "content": "hi"}]
    assert rendered("{{ messages[0]['content'] }}{{ messages|length }}", messages) == "hi1"
    assert messages == [{"role": "user", "content": "hi"}]


@rests_on_it("src/lockstep/data/conversations.py")
def test_generation_blocks_do_not_change_the_text() -> None:
    """`{% generation %}` renders its body, once for each turn of a loop, with variables set outside it. The text equals
    that of the template without the blocks. Spans are returned only with return_assistant_tokens_mask."""
    from transformers.utils.chat_template_utils import render_jinja_template

    body = "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}MARK{{ m.content }}|KRAM{% else %}"
    body += "{{ m.content }}{% endif %}{% endfor %}"
    marked = body.replace("MARK", "{% generation %}").replace("KRAM", "{% endgeneration %}")
    messages = [{"role": role, "content": text} for role, text in [("user", "é"), ("assistant", "a"), ("user", "b")]]
    messages.append({"role": "assistant", "content": ""})
    text = rendered(body.replace("MARK", "").replace("KRAM", ""), messages)
    assert rendered(marked, messages) == text
    both: Any = render_jinja_template(conversations=[messages], chat_template=marked, return_assistant_tokens_mask=True)
    assert both[0] == [text]
    assert [text[begin:over] for begin, over in both[1][0]] == ["a|", "|"]


@rests_on_it("src/lockstep/commands/completion.py")
def test_shtab_completes_options_and_paths() -> None:
    """shtab's script has the options of subparsers that have a help text. An action whose `complete` is FILE or
    DIRECTORY completes paths."""
    shtab = pytest.importorskip("shtab", reason="needs the extra completion")
    parser = argparse.ArgumentParser(prog="lockstep")
    part = parser.add_subparsers().add_parser("train", help="train a model")
    action: Any = part.add_argument("run")
    action.complete = shtab.FILE
    part.add_argument("--steps", choices=["few", "many"])
    for shell, paths in (("bash", "_shtab_compgen_files"), ("zsh", "_files")):
        script = shtab.complete(parser, shell=shell)
        assert paths in script
        assert all(word in script for word in ("train", "--steps", "many"))


@rests_on_it("packages/lockstep-trace-report/src/lockstep_trace_report/__init__.py")
def test_templates_of_a_package_are_loaded_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PackageLoader(PACKAGE, FOLDER) loads templates by name from a folder of an installed package."""
    from jinja2 import Environment, PackageLoader

    (tmp_path / "package_of_pages/pages").mkdir(parents=True)
    (tmp_path / "package_of_pages/__init__.py").touch()
    (tmp_path / "package_of_pages/pages/a.jinja").write_text("{{ 1 + 1 }}")
    monkeypatch.syspath_prepend(tmp_path)
    assert Environment(loader=PackageLoader("package_of_pages", "pages")).get_template("a.jinja").render() == "2"


@rests_on_it("src/lockstep/training/rank.py", "src/lockstep/checkpoint/hub_push.py")
def test_libraries_log_only_errors_after_their_switch() -> None:
    """After set_verbosity_error, the loggers of transformers and of huggingface_hub log errors and no warnings."""
    from huggingface_hub.utils import logging as of_the_hub
    from transformers import logging as of_transformers

    for library, name in ((of_transformers, "transformers"), (of_the_hub, "huggingface_hub")):
        before = library.get_verbosity()
        try:
            library.set_verbosity_error()
            logger = library.get_logger(f"{name}.part")
            assert [logger.isEnabledFor(level) for level in (logging.WARNING, logging.ERROR)] == [False, True]
        finally:
            library.set_verbosity(before)
