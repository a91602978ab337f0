"""Charts on a run's page: axes, points, smoothing, tooltips, per-class scores, and a page that follows a run."""

import json
import re
import time
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.commands import while_it_runs as command
from lockstep.distributed import job_record
from lockstep.track.history import read
from lockstep.track.report import charts, panels
from lockstep.track.report.charts import ChartStyle, lines
from lockstep.track.report.report import Live, write_report
from support.browser import CHROMIUM, browser
from support.messages import mentions
from support.reports import folder_of, text_of


def below(chart: str) -> list[str]:
    """Return the labels of the x axis, from the left."""
    found = re.findall(rf'<text x="([\d.]+)" y="{charts.HEIGHT + charts.BELOW - 3}"[^>]*>([^<]+)<', chart)
    return [text for _, text in sorted(found, key=lambda each: float(each[0]))]


def beside(chart: str) -> list[str]:
    """Return the labels of the y axis, from below."""
    return re.findall(rf'<text x="{charts.LEFT - 4}"[^>]*>([^<]+)<', chart)


# -- axes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "look", "x", "y"),
    [
        ([1.31, 1.92], ChartStyle(), ("0", "282"), ("1.2", "2")),
        ([0.1, 0.93], ChartStyle(linear=True), ("0", "282"), ("0", "1")),
        ([0.03, 70.0], ChartStyle(), ("0", "282"), ("0.01", "100")),
        ([0.3, 40.0], ChartStyle(), ("0", "282"), ("0.2", "50")),
        ([7.0, 7.0], ChartStyle(span=(0.0, 1000.0)), ("0", "1,000"), ("6", "8")),
    ],
)
def test_both_ends_of_both_axes_have_a_number(
    values: list[float], look: ChartStyle, x: tuple[str, str], y: tuple[str, str]
) -> None:
    chart = lines("loss", {"train": [(0.0, values[0]), (282.0, values[1])]}, look)
    assert (below(chart)[0], below(chart)[-1]) == x
    assert (beside(chart)[0], beside(chart)[-1]) == y
    heights = [float(each) for each in re.findall(r'cy="([-\d.]+)"', chart)]
    assert all(0 <= each <= charts.HEIGHT for each in heights)


def test_all_charts_of_a_page_have_the_same_steps(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "run")
    (folder / "system.jsonl").write_text('{"step": 20, "split": "system", "memory_gb/rank0": 0.5}\n')
    history = read(folder)
    drawn = [*panels.curves(history), *panels.memory(history)]
    assert len(drawn) == 5
    assert {(below(chart)[0], below(chart)[-1]) for chart in drawn} == {("0", "40")}


def test_curves_have_one_colour_per_split(tmp_path: Path) -> None:
    loss, accuracy, *_ = panels.curves(read(folder_of(tmp_path / "run")))
    assert 'class="line c0"' in loss
    assert 'class="line c1"' in loss
    assert 'class="line c1"' in accuracy, "validation, as beside the training loss"
    assert 'class="line c0"' not in accuracy


# -- points ----------------------------------------------------------------------------------------------------------


def test_a_single_evaluation_is_drawn(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "run")
    kept = [
        line
        for line in (folder / "metrics.jsonl").read_text().splitlines()
        if '"validation"' not in line or '"step": 40' in line
    ]
    (folder / "metrics.jsonl").write_text("\n".join(kept) + "\n")
    loss, accuracy, *_ = panels.curves(read(folder))
    assert loss.count('class="dot c1"') == 1
    assert accuracy.count('class="dot c1"') == 1


def test_timing_line_without_work_is_drawn(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "out")
    line = {"time": 1010.0, "step": 0, "steps": 3, "ranks": 3, "seconds": {"other": [0.1, 0.1, 0.1]}}
    lines = (folder / "ranks.jsonl").read_text()
    (folder / "ranks.jsonl").write_text(json.dumps(line) + "\n" + lines)
    assert "own work relative to the median rank" in text_of(write_report(folder))


def test_smoothing_keeps_a_line_and_calms_noise() -> None:
    straight = [(float(i), 3.0 * i) for i in range(100)]
    found = [y for _, y in charts.smoothed(straight)]
    assert found == pytest.approx([y for _, y in straight]), "no lag, and no pull at the ends"
    noise = [(float(i), float(i % 2)) for i in range(400)]
    calm = [y for _, y in charts.smoothed(noise)][10:-10]
    assert max(calm) - min(calm) < 0.1


def test_smoothed_curves_are_also_drawn_unsmoothed() -> None:
    points = [(float(i), float(i % 2)) for i in range(40)]
    chart = lines("loss", {"train": points}, ChartStyle(smooth=("train",)))
    assert chart.count('class="line faint c0"') == chart.count('class="line c0"') == 1
    few = lines("loss", {"train": points[: charts.SMOOTHED - 1]}, ChartStyle(smooth=("train",)))
    assert "faint" not in few


def test_the_best_step_is_ringed_and_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "run")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 50, "split": "validation", "loss": 9.0, "accuracy": 0.9}) + "\n")
    loss, accuracy, *_ = panels.curves(read(folder))
    assert "best, step 40" in loss
    assert 'class="ring c1"' in loss
    assert "ring" not in accuracy
    assert "1.7 best loss, validation, step 40" in text_of(write_report(folder))
    (folder / "run.yaml").write_text(json.dumps({"name": "made", "checkpoint": {"best": "accuracy"}}))
    assert "0.9 best accuracy, validation, step 50" in text_of(write_report(folder))


def test_every_point_can_be_pointed_at() -> None:
    chart = lines("loss", {"train": [(1.0, 3.0), (10.0, 2.0)], "a <b>": [(10.0, 2.5)]}, ChartStyle(span=(0.0, 20.0)))
    told = [re.sub("<[^>]*>", " ", each).split() for each in re.findall(r'<g class="at">.*?</g>', chart)]
    assert told == [["step", "1", "train", "3"], ["step", "10", "train", "2", "a", "&lt;b&gt;", "2.5"]]
    strips = [(float(x), float(w)) for x, w in re.findall(r'<rect x="([\d.]+)" y="[-\d]+" width="([\d.]+)"', chart)]
    assert strips[0][0] == charts.LEFT
    assert sum(w for _, w in strips) == pytest.approx(charts.WIDTH - charts.LEFT - charts.RIGHT, abs=0.2)
    long = lines("loss", {"train": [(float(i), 1.0 + i) for i in range(50_000)]})
    assert long.count('<g class="at">') <= charts.STRIPS
    assert len(long) < 60_000


# -- classes ---------------------------------------------------------------------------------------------------------


def test_a_table_is_behind_each_chart() -> None:
    series = {"train": [(float(x), x / 7) for x in range(1, 401)], "validation": [(100.0, 1.5), (400.0, 2.5)]}
    text = lines("loss", series)
    table = text[text.index('<details class="data">') :]
    rows = re.findall(r"<tr>(.*?)</tr>", table)
    cells = {row[0]: row[1:] for row in (re.findall(r"<td>(.*?)</td>", row) for row in rows[1:])}
    assert re.findall(r"<th>(.*?)</th>", rows[0]) == ["step", "train", "validation"]
    assert cells["1"] == ["0.1429", ""]
    assert cells["400"] == ["57.14", "2.5"], "the last of both"
    assert cells["100"][1] == "1.5"
    assert len(cells) <= charts.ROWS + 2
    assert f"{len(cells)} of 400 points" in table


@pytest.mark.parametrize("ends", [(0.9515, 0.953), (0.0, 2.0), (1e-5, 9e-5), (1000.0, 30000.0)])
def test_log_levels_look_different(ends: tuple[float, float]) -> None:
    text = lines("roc auc", {"validation": [(1.0, ends[0]), (2.0, ends[1])]})
    levels = re.findall(r'<text x="40" [^>]*>([^<]+)</text>', text)
    assert len(set(levels)) == len(levels) > 2


def test_checks_are_listed_with_their_results(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "out")
    assert [(name, fine) for name, fine, _ in panels.checks(read(folder))] == [("loss and gradients", True)]
    events = (folder / "events.jsonl").read_text().splitlines()
    first = json.loads(events[0]) | {"compared": "equal to rounding"}
    finish = {"time": 1060.0, "event": "finish", "step": 40, "export": "other losses", "export_agrees": False}
    guard = {"time": 1050.0, "event": "guard", "step": 7, "out": ["rank 1"]}
    lines_of = [json.dumps(first), *events[1:], json.dumps(guard), json.dumps(finish)]
    (folder / "events.jsonl").write_text("\n".join(lines_of) + "\n")
    found = {name: (fine, text) for name, fine, text in panels.checks(read(folder))}
    assert found["plain reference, before the first step"] == (True, "equal to rounding")
    assert found["export"] == (False, "other losses")
    fine, text = found["silent data corruption (sdc_check)"]
    assert (fine, "in step 8" in text, "rank 1 computed wrongly" in text) == (False, True, True)
    assert "other losses" in text_of(write_report(folder))


def test_findings_are_at_the_top(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "out")
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]

    def page(*more: dict, log: str = "") -> str:
        lines_of = [json.dumps(event) for event in [events[0] | {"compared": "not compared: why"}, *more]]
        (folder / "events.jsonl").write_text("\n".join(lines_of) + "\n")
        (folder / "log.txt").write_text(log)
        return text_of(write_report(folder)).partition("output folder")[0]

    failed = {
        "time": 1050.0,
        "event": "failed",
        "step": 40,
        "error": "TrainingFailed",
        "code": "LS5160",
        "place": "step 41",
    }
    guard = {"time": 1049.0, "event": "guard", "step": 7, "out": ["rank 1"]}
    saved = {"time": 1048.0, "event": "checkpoint", "step": 30}
    said = "lockstep: other [LS0001]\nlockstep: the loss is no number [LS5160]\n  rows 1, 2\n"
    text = page(saved, guard, failed, log=said)
    assert "The same command continues from step 30." in text
    assert "The run failed after step 40 the loss is no number [LS5160]" in text
    assert "Silent data corruption (sdc_check) in step 8" in text
    assert "TrainingFailed while step 41; see log.txt" in page(failed, log="lockstep: older [LS0001]\n")
    text = page(guard | {"out": []}, failed, log=said)
    assert "Silent data corruption" not in text, "the failure says it"
    assert "No end is recorded after step 40" in page()
    assert "starts over" in page()
    lost = {"time": 1049.0, "event": "regroup", "step": 12, "what": "rank 1 is lost", "processes": 1}
    assert "The ranks changed after step 12 rank 1 is lost; 1 process continues" in page(lost)
    finish = {"time": 1060.0, "event": "finish", "step": 40}
    text = page(finish)
    assert "All checks passed. Not checked: plain reference, before the first step." in text
    assert "recorded" not in text
    (folder / "metrics.jsonl").write_text("")
    (folder / "events.jsonl").write_text("")
    (folder / "log.txt").write_text(said)
    assert "The run ended before its first step the loss is no number" in text_of(write_report(folder))
    assert "before its first step" not in text_of(write_report(folder, Live(5, "starting")))


def test_scores_of_each_class_and_errors_that_are_seen(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "run")
    table = {"labels": ["a", "b", "never"], "counts": [[980, 20, 0], [1, 99, 0], [0, 0, 0]]}
    (folder / "tables.json").write_text(json.dumps({"test": {"confusion": table}}))
    page = write_report(folder)
    said = text_of(page)
    assert "a 0.999 0.980 0.989 1,000" in said
    assert "b 0.832 0.990 0.904 100" in said
    assert "never \u2013 \u2013 \u2013 0" in said
    cells = re.findall(r'<td class="(right|wrong)" style="--share:(\d+)%"', page.read_text())
    assert cells == [("right", "69"), ("wrong", "70"), ("wrong", "40"), ("right", "69")], "2 % are seen as the most"


# -- a page that follows a run ---------------------------------------------------------------------------------------


def test_live_page_shows_progress_and_reloads(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "run")
    page = write_report(folder, Live(5, "training", 80))
    assert '<meta http-equiv="refresh" content="5">' in page.read_text()
    assert '<progress value="40" max="80">' in page.read_text()
    assert "training, step 40 of 80" in text_of(page)
    page = write_report(folder)
    assert "http-equiv" not in page.read_text()
    assert "<progress" not in page.read_text()


def test_live_page_is_written_until_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """This process stands for a training one: it ends while the command sleeps for the second time."""
    folder = folder_of(tmp_path / "run")
    (folder / "run.yaml").write_text(
        "{name: made, data: {source: builtin/emotion}, model: {type: gpt2}, tokenizer: {train: bpe}}"
    )
    job_record.write(folder, job_record.here("local", 1))
    job_record.note(folder, steps=40)
    live: list[bool] = []

    def sleep(seconds: float) -> None:
        live.append("http-equiv" in (folder / "report.html").read_text())
        if len(live) == 2:
            job_record.note(folder, status=0, ended=time.time())

    monkeypatch.setattr(command.time, "sleep", sleep)
    assert main(["report", str(folder), "--live"]) == 0
    assert live == [True, True]
    assert "http-equiv" not in (folder / "report.html").read_text()
    assert capsys.readouterr().out == (folder / "report.html").as_uri() + "\n"
    assert not list(folder.glob(".*.partial"))


def test_interrupted_report_leaves_a_static_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path / "run")
    (folder / "run.yaml").write_text(
        "{name: made, data: {source: builtin/emotion}, model: {type: gpt2}, tokenizer: {train: bpe}}"
    )
    job_record.write(folder, job_record.here("local", 1))

    def sleep(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command.time, "sleep", sleep)
    assert main(["report", str(folder), "--live"]) == 0
    assert "http-equiv" not in (folder / "report.html").read_text()


@pytest.mark.parametrize("words", [["a", "b", "--live"], ["a", "--to", "x.html", "--live"]])
def test_only_one_run_is_followed(words: list[str], capsys: pytest.CaptureFixture) -> None:
    assert main(["report", *words]) == 2
    assert mentions(capsys.readouterr().err, "LS8139")


# -- in a browser ----------------------------------------------------------------------------------------------------

CUT = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.innerText)"


@pytest.mark.processes
@pytest.mark.skipif(not CHROMIUM, reason="needs chromium")
def test_report_page_in_a_browser(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "run")
    labels = ["sadness", "joy", "love", "anger", "fear", "surprise"]
    table = {"labels": labels, "counts": [[100 + i * j for j in range(6)] for i in range(6)]}
    (folder / "tables.json").write_text(json.dumps({"test": {"confusion": table}}))
    page = write_report(folder, Live(1, "training", 80))
    with browser() as shown:
        for width in (390, 1280):
            shown.open(page, width)
            assert shown.value(CUT) == [], "no table is cut"
            assert shown.value("document.querySelector('.hash b').getClientRects().length") == 1
            assert shown.value("(e => e.scrollWidth <= e.clientWidth)(document.querySelector('.hash b'))")
        tops = "[...document.querySelectorAll('#confusion ~ .beside > *')].map(e => e.getBoundingClientRect().top)"
        assert len(set(shown.value(tops))) == 1, "beside each other"
        assert shown.value("document.querySelector('meta[http-equiv]') !== null")
        box = "document.querySelector('svg.chart').getBoundingClientRect()"
        x, y = shown.value(f"(r => [r.x + r.width / 2, r.y + r.height / 2])({box})")
        shown.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        told = "[...document.querySelectorAll('.at text')].filter(e => getComputedStyle(e).opacity == 1).length"
        assert shown.value(told) == 1, "what is pointed at is told"
        write_report(folder)
        until = time.monotonic() + 60
        while shown.value("document.querySelector('meta[http-equiv]') !== null") and time.monotonic() < until:
            time.sleep(0.2)
        assert shown.value("document.querySelector('.state').innerText") == "finished, step 40", "it loaded itself"
        assert shown.complaints == []


# -- the schedule ----------------------------------------------------------------------------------------------------


def test_planned_and_actual_rates_are_drawn(tmp_path: Path) -> None:
    """The run has done 40 of 100 steps."""
    folder = folder_of(tmp_path / "run")
    (folder / "run.yaml").write_text(
        json.dumps({"name": "x", "optim": {"learning_rate": 1e-3, "schedule": "wsd", "warmup_steps": 10}})
    )
    events = (folder / "events.jsonl").read_text().replace('"processes": 3', '"steps": 100, "processes": 3')
    (folder / "events.jsonl").write_text(events)
    for step in range(10, 41, 10):
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": step, "split": "train", "loss": 1.0, "learning_rate": 1e-3}) + "\n")
    history = read(folder)
    assert len(history.planned_rates) == 100
    assert dict(history.planned_rates)[11.0] == 1e-3
    assert dict(history.planned_rates)[96.0] == pytest.approx(5e-4)
    chart = next(chart for chart in panels.curves(history) if "learning rate" in chart)
    assert "as planned" in chart
    assert below(chart)[-1] == "100"
    (folder / "run.yaml").write_text(json.dumps({"name": "x", "optim": {"schedule": "of another version"}}))
    assert read(folder).planned_rates == []


def test_plots_of_a_task_are_among_its_predictions() -> None:
    plot = {"title": "recall", "x": "texts looked at", "lines": {"recall": [[1, 0.2], [10, 0.7]]}}
    (panel,) = panels.panels({"validation": {"plots": [plot]}, "test": {"confusion": {}}})
    assert panel["split"] == "validation"
    (chart,) = panel["charts"]
    assert "<figcaption>recall</figcaption>" in chart
    assert "texts looked at" in chart
