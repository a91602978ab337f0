"""Report pages: their contents for any state of an output folder, and their layout in a browser."""

import json
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.distributed import event_log
from lockstep.distributed.event_log import EventLog
from lockstep.distributed.step_timer import NAMES
from lockstep.distributed.world import World
from lockstep.track.history import lines_of, read
from lockstep.track.report import charts
from lockstep.track.report.report import write_comparison, write_report
from support.browser import CHROMIUM, browser
from support.command import STEPS, CommandJob, each_step_once, ended
from support.harness import run_on, tiny
from support.messages import mentions
from support.reports import folder_of, text_of

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")


# -- one run ---------------------------------------------------------------------------------------------------------


def test_a_straggler_is_named_with_its_host(tmp_path: Path) -> None:
    said = text_of(write_report(folder_of(tmp_path / "slow", steps=60, slow=1.5)))
    assert "Rank 2 on two is a straggler: its own work per micro-batch took 1.50 times the median" in said
    assert "2.5 s more in 50 steps" in said  # five times half a second; the first log point is left out
    assert "Rank 2 is slower than the others (Where the time went)." in said  # beside the verdict


def test_few_steps_or_two_ranks_name_no_straggler(tmp_path: Path) -> None:
    said = text_of(write_report(folder_of(tmp_path / "short", steps=40, slow=1.5)))
    assert "is a straggler" not in said
    assert "30 timed steps are too few to tell a straggler from chance" in said
    folder = folder_of(tmp_path / "two", steps=60, slow=1.5)
    lines = [json.loads(line) for line in (folder / "ranks.jsonl").read_text().splitlines()]
    for line in lines:
        line |= {"ranks": 2, "seconds": {phase: each[1:] for phase, each in line["seconds"].items()}}
    (folder / "ranks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = text_of(write_report(folder))
    assert "is a straggler" not in said
    assert "slower than the others" not in said
    assert "Rank 1 took 1.50 times as long as the other rank" in said


def test_ranks_with_more_micro_batches_are_no_stragglers(tmp_path: Path) -> None:
    """Eight micro-batches over three ranks: the last backward of each step overlaps with the reduction."""
    folder = folder_of(tmp_path / "uneven", steps=60)
    lines = [json.loads(line) for line in (folder / "ranks.jsonl").read_text().splitlines()]
    for slow, named in ((1.0, False), (1.5, True)):
        for line in lines:
            line["seconds"] |= {"forward": [2.0, 3.0, 3.0 * slow], "backward": [0.0, 2.0, 2.0 * slow]}
            line["micro_batches"] = {"forward": [20, 30, 30], "backward": [0, 20, 20]}
        (folder / "ranks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert (
            "Rank 2 on two is a straggler: its own work per micro-batch took 1.50" in text_of(write_report(folder))
        ) == named


def test_one_slow_moment_makes_no_straggler(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "moment", steps=100)
    lines = [json.loads(line) for line in (folder / "ranks.jsonl").read_text().splitlines()]
    lines[4]["seconds"]["forward"][2] *= 50
    (folder / "ranks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "is a straggler" not in text_of(write_report(folder))


def test_ranks_that_only_wait_are_no_stragglers(tmp_path: Path) -> None:
    """Control: if all ranks work at equal speed, none is named, however long they wait for gradients."""
    said = text_of(write_report(folder_of(tmp_path / "even", steps=60)))
    assert "is a straggler" not in said
    assert "No straggler" in said


def test_the_page_names_strategies_that_hide_stragglers(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "blind", slow=3.0)
    events = (folder / "events.jsonl").read_text()
    inside = '"waits_inside": ["forward", "backward", "reduction"]'
    (folder / "events.jsonl").write_text(re.sub(r'"waits_inside": \[[^]]*\]', inside, events))
    said = text_of(write_report(folder))
    assert "straggler" not in said
    assert "a slow rank cannot be distinguished from those that wait for it" in said


def test_prices_of_padding_and_communication(tmp_path: Path) -> None:
    said = text_of(write_report(folder_of(tmp_path / "run")))
    assert "padding 20.0% of the computed tokens" in said  # 1.25 tokens for one
    assert "communication 16.7% of the time" in said  # 0.2 s of 1.2 s


def test_the_page_has_hosts_versions_and_commit(tmp_path: Path) -> None:
    said = text_of(write_report(folder_of(tmp_path / "run")))
    for text in ("one: ranks 0 to 1; two: rank 2", "torch 2.13", "0123456789ab on main, 2 changed files", "abababab"):
        assert text in said, text


def test_untrusted_text_is_escaped_in_pages(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script>"
    folder = folder_of(tmp_path / "run", name=bad)
    (folder / "samples.jsonl").write_text(json.dumps({"step": 40, "samples": [{"text": bad, "label": '"&'}]}) + "\n")
    table = {"labels": [bad, "b"], "counts": [[3, 1], [0, 4]]}
    (folder / "tables.json").write_text(json.dumps({"test": {"confusion": table}}))
    page = write_report(folder)
    assert "<script" not in page.read_text()
    assert text_of(page).count(bad) >= 4  # title, heading, sample, label


def test_a_page_of_what_a_killed_run_left(tmp_path: Path) -> None:
    """The folder has partial lines, a step trained twice, and a start without an end."""
    folder = folder_of(tmp_path / "run")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(
            json.dumps({"step": 40, "split": "train", "loss": 7.5, "examples_per_s": None}) + '\n{"step": 50, "spl'
        )
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    begun = events[0] | {"time": 5000.0, "step": 20}
    (folder / "events.jsonl").write_text(
        "".join(json.dumps(e) + "\n" for e in [*events[:3], begun]) + '{"time": 5001, "ev'
    )
    history = read(folder)
    assert history.series("train", "loss")[-1] == (40.0, 7.5)
    assert [(a.first, a.last, a.how) for a in history.attempts] == [(0, 40, "lost"), (20, 20, "lost")]
    assert history.state == "not finished"
    assert "no end recorded" in text_of(write_report(folder))


def test_a_clock_that_was_set_back_does_not_unfinish_a_run(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "run")
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    for event in events[2:]:
        event["time"] -= 5000  # an hour and more, on the first night of winter
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    history = read(folder)
    assert history.state == "finished"
    (attempt,) = history.attempts
    assert (attempt.how, attempt.last) == ("finish", 40)
    assert attempt.ended >= attempt.began


def test_a_page_of_a_run_that_has_only_begun(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("name: young\n")
    assert "not finished, step 0" in text_of(write_report(tmp_path))


def test_more_ranks_than_fit_are_cut_to_those_that_work_longest(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "run")
    work = [1.0] * 199 + [4.0]
    line = {"time": 1010.0, "step": 10, "steps": 10, "ranks": 200, "seconds": {"forward": work}}
    (folder / "ranks.jsonl").write_text(json.dumps(line) + "\n")
    page = write_report(folder)
    assert "The 64 ranks with the most work of their own, of 200" in text_of(page)
    assert "rank 199" in text_of(page)


# -- several runs ----------------------------------------------------------------------------------------------------


def test_comparison_page_lists_the_differences(tmp_path: Path) -> None:
    folders = [folder_of(tmp_path / "a", 1e-3), folder_of(tmp_path / "b", 2e-3), folder_of(tmp_path / "c", 1e-3)]
    page = write_comparison(folders, tmp_path / "pages" / "all.html")
    said = text_of(page)
    assert "optim.learning_rate 0.001 0.002 0.001" in said
    assert "seed" not in said
    assert "validation loss 1.7 1.3 1.7" in said
    assert 'href="../a/report.html"' in page.read_text()


def test_runs_of_one_name_are_distinguished_by_their_folders(tmp_path: Path) -> None:
    folders = [folder_of(tmp_path / "x" / "out"), folder_of(tmp_path / "y" / "out")]
    said = text_of(write_comparison(folders, tmp_path / "all.html"))
    assert "x/out" in said
    assert "y/out" in said


def test_the_report_command_writes_a_page_each_and_one_for_all(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for name in "ab":
        folder_of(tmp_path / name)
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        str(tmp_path / page) for page in ("a/report.html", "b/report.html", "comparison.html")
    ]
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b"), "--to", str(tmp_path / "p.html")]) == 0
    assert (tmp_path / "p.html").is_file()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nothing"], "nothing: no such folder"),
        (["a", "nothing"], "nothing: no such folder"),
        (["a", "a"], "a is given twice"),
        (["a", "--to", "x.html"], "--to: writes a comparison, which needs two"),
    ],
)
def test_runs_that_cannot_be_compared(words: list[str], says: str, here: Path, capsys: pytest.CaptureFixture) -> None:
    folder_of(here / "a")
    assert main(["report", *words]) == 2
    assert says in capsys.readouterr().err


# -- charts ----------------------------------------------------------------------------------------------------------


def test_a_long_series_is_thinned_and_keeps_its_extremes() -> None:
    points = [(float(i), 1.0) for i in range(10_000)]
    points[5_000] = (5_000.0, 50.0)
    found = charts.thinned(points)
    assert len(found) <= charts.POINTS
    assert found[-1][0] == 9_999.0
    assert max(high for _, _, _, high in found) == 50.0


@pytest.mark.parametrize(
    ("values", "says"),
    [([0.001, 1.0, 1000.0], "logarithmic"), ([1.0, 2.0], None), ([3.0, 3.0], None), ([0.0, 0.0], None), ([5.0], None)],
)
def test_charts_choose_linear_or_logarithmic_scales(values: list[float], says: str | None) -> None:
    chart = charts.lines("x", {"a": [(float(i), v) for i, v in enumerate(values)]})
    assert ("logarithmic" in chart) == (says is not None)
    places = [float(y) for y in re.findall(r'cy="([-.\d]+)"', chart)]
    assert len(places) == len(values)
    assert all(-0.1 <= y <= charts.HEIGHT + 0.1 for y in places)


def test_series_keeps_its_colour_if_others_are_empty() -> None:
    points = [(0.0, 1.0), (1.0, 2.0)]
    assert 'class="line c1"' in charts.lines("x", {"a": [], "b": points})
    assert 'class="line c0"' not in charts.lines("x", {"a": [], "b": points})


def test_doubling_axis_spaces_powers_of_two_evenly() -> None:
    place = charts.Axes(8, 128, 0.0, 1.0, False, doubling=True)
    ways = [place.across(count) for count in (8, 16, 32, 64, 128)]
    assert [b - a for a, b in pairwise(ways)] == pytest.approx([ways[1] - ways[0]] * 4)
    chart = charts.lines("x", {"a": [(8, 1.0), (64, 2.0), (1024, 3.0)]}, charts.ChartStyle("processes", doubling=True))
    assert all(f">{count}</text>" in chart for count in ("8", "64", "1,024"))


def test_empty_series_have_no_chart() -> None:
    assert charts.lines("x", {"a": []}) == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [(12345, "12,345"), (0.12345, "0.1235"), (5e-5, "5e-5"), (1234.5, "1,234"), (0.0, "0"), ("a", "a")],
)
def test_format_of_chart_numbers(value: object, text: str) -> None:
    assert charts.number(value) == text


# -- the data behind it ----------------------------------------------------------------------------------------------


def write_journal(world: World, folder: str) -> None:
    found = EventLog(world, Path(folder))
    found.event(
        "start", 0, **event_log.facts(tiny().launch, tiny().model, world, (), {"model": "m"}, "host", ("reduction",))
    )
    for step in (5, 10):
        found.times(step, [*(float(world.rank + place) for place in range(len(NAMES))), *[world.rank + 1.0] * 4])
    found.answer()
    found.saved(10)
    found.saved(10)
    found.times(15, [1.0] * (len(NAMES) + 4))  # gets no answer: a rank failed
    found.regroup(12)
    found.last_times(20, [1.0] * (len(NAMES) + 4))


@pytest.mark.processes
def test_the_journal_holds_every_rank_and_outlives_half_a_line(tmp_path: Path) -> None:
    run_on(3, write_journal, str(tmp_path))
    with open(tmp_path / "ranks.jsonl", "a") as file:
        file.write('{"half": ')
    run_on(2, write_journal, str(tmp_path))
    assert "\n\n" not in (tmp_path / "ranks.jsonl").read_text()
    found = list(lines_of(tmp_path / "ranks.jsonl", ("ranks", "seconds")))
    assert [(line["step"], line["steps"], line["ranks"]) for line in found] == [
        (5, 5, 3),
        (10, 5, 3),
        (20, 8, 3),
        (5, 5, 2),
        (10, 5, 2),
        (20, 8, 2),
    ]
    assert found[0]["seconds"]["data"] == [1.0, 2.0, 3.0]
    assert found[0]["micro_batches"]["forward"] == [1, 2, 3]
    events = list(lines_of(tmp_path / "events.jsonl", ("event",)))
    assert [e["event"] for e in events] == ["start", "checkpoint"] * 2
    assert events[0]["processes"] == 3
    assert len(events[0]["hosts"]) == 3
    assert events[0]["versions"]["torch"]


@pytest.mark.processes
@linux
def test_history_of_an_uninterrupted_run(untouched: Path) -> None:
    history = read(untouched / "out")
    assert history.state == "finished"
    assert sum(line["steps"] for line in history.ranks) == STEPS
    assert {"data", "forward", "backward", "overlapped", "reduction", "optimizer", "evaluation"} <= set(history.seconds)
    assert all(len(each) == 2 and min(each) >= 0 for each in history.seconds.values())
    assert history.sees_stragglers
    saved = [e["step"] for e in history.events if e["event"] == "checkpoint"]
    assert saved == sorted(saved)
    assert saved[-1] == STEPS
    table = history.tables["validation"]["confusion"]
    right = sum(table["counts"][i][i] for i in range(len(table["labels"])))
    numbers = history.results["validation"]
    assert sum(map(sum, table["counts"])) == numbers["examples"]
    assert right / numbers["examples"] == pytest.approx(numbers["accuracy"])
    assert history.facts_of("finish")["weights"] in untouched_said(untouched)


def untouched_said(folder: Path) -> str:
    log = folder / "out" / "log.txt"
    return log.read_text() if log.exists() else ""


@pytest.mark.processes
@linux
@pytest.mark.usefixtures("nobody_is_left")
def test_a_run_that_was_stopped_has_two_starts_and_the_same_metrics(
    tmp_path: Path, job: CommandJob, untouched: Path
) -> None:
    job.write()
    assert ended(job.start("max_time=0.001s"))[0] == 75
    job.finish()
    history = read(tmp_path / "out")
    first, second = history.attempts
    assert (first.first, first.how, second.how, second.last) == (0, "stop", "finish", STEPS)
    assert first.last == second.first
    assert sum(line["steps"] for line in history.ranks) == STEPS
    each_step_once(tmp_path, untouched)
    said = text_of(tmp_path / "out" / "report.html")
    assert "stopped on request at step" in said


# -- in a browser ----------------------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.skipif(not CHROMIUM, reason="needs chromium")
def test_pages_fit_a_phone_and_a_desk_light_dark_and_print(tmp_path: Path) -> None:
    """No horizontal overflow, no console messages, no network requests, and colors that follow the reader's
    settings."""
    wide = "a-very-long-name-of-a-run-that-nobody-can-break-into-lines-" * 2
    one, two = folder_of(tmp_path / "a", slow=1.4, name=wide), folder_of(tmp_path / wide, 2e-3)
    labels = [f"a long label {i}" for i in range(20)]
    table = {"labels": labels, "counts": [[i * j for j in range(20)] for i in range(20)]}
    (one / "tables.json").write_text(json.dumps({"test": {"confusion": table}}))
    (one / "samples.jsonl").write_text(
        json.dumps({"step": 40, "samples": [{"text": "word" * 100, "label": "x"}]}) + "\n"
    )
    pages = [write_report(one), write_comparison([one, two], tmp_path / "all.html")]
    with browser() as shown:
        for page in pages:
            papers = set()
            for width in (390, 1280):
                for scheme in ("light", "dark"):
                    shown.open(page, width, scheme)
                    assert shown.value("document.documentElement.scrollWidth") <= width
                    assert shown.complaints == []
                    papers.add(shown.value("getComputedStyle(document.body).backgroundColor"))
            assert len(papers) == 2
            shown.open(page, 800, "dark", "print")
            assert shown.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
            assert shown.pdf().startswith(b"%PDF")


@pytest.mark.parametrize(
    "values", [[1, 2], 7, {"event": 3, "time": "x", "step": "y"}, {"step": [1], "split": {"a": 1}}]
)
@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl", "ranks.jsonl", "samples.jsonl", "tables.json"])
def test_values_of_other_types_end_no_report(name: str, values: object, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(tiny(f"output={tmp_path}").dump())
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "split": "train", "loss": 1.5}\n')
    with open(tmp_path / name, "a", encoding="utf-8") as file:
        file.write(json.dumps(values) + "\n")
    assert main(["report", str(tmp_path)]) == 0
    assert (tmp_path / "report.html").is_file()


def test_files_with_unusable_report_lines_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path / "one", steps=60)
    damage = {
        "ranks.jsonl": {"time": 1.0, "step": 70, "steps": 1, "ranks": 2, "seconds": {"forward": ["x", 2.0]}},
        "events.jsonl": {"time": 1.0, "event": "checkpoint", "step": [1]},
    }
    for names, name in (("ranks.jsonl",), "ranks.jsonl"), (("events.jsonl", "ranks.jsonl"), "events.jsonl"):
        with open(folder / name, "a", encoding="utf-8") as file:
            file.write(json.dumps(damage[name]) + "\n")
        assert main(["report", str(folder)]) == 2
        files = " and ".join(str(folder / name) for name in names)
        mentions(capsys.readouterr().err, "LS8530", f": {files} hold")


HUGE = 10**400


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("metrics.jsonl", {"step": 2, "split": "train", "loss": HUGE}),
        ("metrics.jsonl", {"step": HUGE, "split": "train", "loss": 1.0}),
        ("ranks.jsonl", {"time": 1.0, "step": 1, "steps": HUGE, "ranks": 2, "seconds": {"forward": [1.0, 2.0]}}),
        ("system.jsonl", {"step": 1, "memory_gb/rank0": HUGE}),
        ("scores.json", {"step": 1, "splits": {"validation": {"loss": HUGE}}}),
        ("scores.json", {"step": 1, "splits": {"validation": []}}),
    ],
)
@pytest.mark.parametrize("command", [["report"], ["status"]])
def test_numbers_that_no_float_holds_end_no_command(
    command: list[str], name: str, values: object, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "one", steps=60)
    (folder / "run.yaml").write_text(tiny(f"output={folder}").dump())
    with open(folder / name, "w" if name.endswith(".json") else "a", encoding="utf-8") as file:
        file.write(json.dumps(values) + "\n")
    assert main([*command, str(folder)]) == 0


@pytest.mark.parametrize("command", [["report"], ["report", "--live"]])
def test_values_out_of_chart_range_are_a_message(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(tmp_path / "one", steps=60)
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write("".join(json.dumps({"step": 70 + i, "split": "train", "loss": 1e308 * i}) + "\n" for i in (-1, 1)))
    assert main([*command, str(folder)]) in (0, 2)
    other = folder_of(tmp_path / "two", steps=60)
    status = main(["report", str(folder), str(other)])
    said = capsys.readouterr().err
    assert status == 0 or "metrics.jsonl" in said


def test_a_page_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(folder_of(tmp_path / name, steps=60)) for name in ("one", "two")]
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for to, why in ((loop / "page.html", "its links form a loop"), (tmp_path / "one", "is a directory")):
        assert main(["report", *folders, "--to", str(to)]) == 2
        mentions(capsys.readouterr().err, "LS8142", f"{to.parent if to.name == 'page.html' else to}: {why}")
