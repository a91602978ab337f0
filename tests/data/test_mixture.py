"""Several sources of examples: the order is a pure function of the step, sources keep their shares and are read
completely each epoch, their columns are renamed, and each has a separate loss."""

import gzip
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.checkpoint.manifest import Manifest, changed
from lockstep.config.run import Run, RunError, load
from lockstep.data.arrow_cache import Columns, Prepared
from lockstep.data.job import Job, arithmetic_of
from lockstep.data.order import PERIOD, ByLength, MixedOrder, _counts
from lockstep.distributed.world import World
from lockstep.strategies.exact.gradient_sum import share
from lockstep.tasks.task import make_task
from lockstep.training.consistency_check import facts
from lockstep.training.data_loader import StepLoader
from lockstep.training.evaluation import evaluate
from support.caches import prepared
from support.expected_batches import CPU, rows_in, wanted_rows
from support.harness import build_with_feed, digest, run_on, tiny
from support.messages import mentions, raises
from support.mixtures import mixed, texts

pytestmark = pytest.mark.slow  # together a third of the time of tests without processes

# -- the order -------------------------------------------------------------------------------------------------------

SIZES = st.lists(st.integers(1, 120), min_size=1, max_size=5)


@settings(max_examples=30)
@given(SIZES, st.integers(1, 40), st.integers(0, 2**63 - 1))
def test_without_weights_an_epoch_uses_every_example_once(sizes: list[int], batch: int, seed: int) -> None:
    order = MixedOrder(sizes, [[] for _ in sizes], batch, seed)
    for epoch in range(2):
        steps = [order.step(epoch * order.steps_per_epoch + t) for t in range(order.steps_per_epoch)]
        assert sorted(np.concatenate(steps)) == list(range(sum(sizes)))
        assert [len(rows) for rows in steps[:-1]] == [batch] * (len(steps) - 1)


@settings(max_examples=6)
@given(st.data(), SIZES, st.integers(1, 300), st.integers(0, 1000))
def test_with_weights_each_source_is_used_whole_epoch_after_epoch(
    data: st.DataObject, sizes: list[int], batch: int, seed: int
) -> None:
    weight = st.floats(0.01, 100)
    schedules = [[(0, data.draw(weight)), (data.draw(st.integers(1, 30)), data.draw(weight))] for _ in sizes]
    order = MixedOrder(sizes, schedules, batch, seed)
    rows = [order.step(t) for t in range(60)]
    so_far = np.zeros(len(sizes), dtype=np.int64)
    for t, some in enumerate(rows):
        assert order.consumed(t).tolist() == so_far.tolist()
        so_far += np.histogram(some, [*order.first, sum(sizes)])[0]
    everything = np.concatenate(rows)
    for first, size, used in zip(order.first, sizes, so_far, strict=True):
        mine = everything[(everything >= first) & (everything < first + size)]
        whole = used // size * size
        for epoch in range(0, whole, size):
            assert sorted(mine[epoch : epoch + size] - first) == list(range(size))
        assert len(set(mine[whole:])) == used - whole
    for t in np.random.default_rng(seed).permutation(60)[:8]:  # another starting point, anywhere
        assert MixedOrder(sizes, schedules, batch, seed).step(int(t)).tolist() == rows[t].tolist()


def test_shares_follow_the_weights() -> None:
    order = MixedOrder([1000, 10, 100], [[(0, 6.0), (500, 1.0)], [(0, 3.0)], [(0, 1.0)]], 64, 3)
    before, after = order.consumed(500), order.consumed(1500) - order.consumed(500)
    assert np.abs(before / before.sum() - [0.6, 0.3, 0.1]).max() < 0.01
    assert np.abs(after / after.sum() - [0.2, 0.6, 0.2]).max() < 0.01
    counts = _counts(order.sizes, [[(0, 1e9)], [(0, 1e-9)], [(0, 1e-9)]], 0)
    assert (counts.sum(), counts[1], counts[2]) == (PERIOD, 1, 1)  # a small weight is not zero
    assert order.summary(["a", "b", "c"], 500).startswith("a 60.")
    other = MixedOrder([1000, 10, 100], [[(0, 6.0), (500, 1.0)], [(0, 3.0)], [(0, 1.0)]], 64, 4)
    assert (order.step(7) != other.step(7)).any()
    assert (order.step(7) != order.step(8)).any()


def test_late_steps_cost_no_more_than_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost is counted in permuted positions, for any sizes."""
    from lockstep.data import order as orders

    asked = []
    permute = orders.permute
    monkeypatch.setattr(orders, "permute", lambda p, *rest: (asked.append(len(p)), permute(p, *rest))[1])
    costs = []
    for schedules in ([[], []], [[(0, 1.0), (10**6, 2.0)], [(0, 1.0)]]):
        order = MixedOrder([10**8, 10**7], schedules, 256, 1)
        for step in (0, 10**9):
            asked.clear()
            assert len(np.unique(order.step(step))) == 256
            costs.append(sum(asked))
    assert max(costs) <= 2 * PERIOD + 512


@settings(max_examples=10)
@given(st.booleans(), st.integers(1, 40), st.integers(2, 9), st.integers(0, 1000))
def test_sorting_by_length_keeps_the_examples_of_a_window(weighted: bool, batch: int, window: int, seed: int) -> None:
    sizes = [70, 9, 31]
    lengths = np.random.default_rng(seed).integers(1, 50, sum(sizes))
    schedules = [[(0, 2.0), (7, 1.0)], [(0, 1.0)], [(0, 1.0), (11, 9.0)]] if weighted else [[], [], []]
    plain = MixedOrder(sizes, schedules, batch, seed)
    order = ByLength(plain, lengths, window)
    count = order.steps_per_epoch
    steps = [order.step(t) for t in range(3 * count)]
    for epoch in range(0, 3 * count, count):
        for first in range(epoch, epoch + count, window):
            some = range(first, min(first + window, epoch + count))
            rows = np.concatenate([steps[t] for t in some])
            assert sorted(rows) == sorted(np.concatenate([plain.step(t) for t in some]))
            whole = [lengths[steps[t]] for t in some if len(steps[t]) == batch]
            spans = sorted((part.min(), part.max()) for part in whole)
            assert all(high <= low for (_, high), (low, _) in itertools.pairwise(spans))
    for t in np.random.default_rng(seed).permutation(3 * count)[:8]:  # from anywhere
        again = ByLength(MixedOrder(sizes, schedules, batch, seed), lengths, window)
        assert again.step(int(t)).tolist() == steps[t].tolist()
        assert len(steps[t]) == len(plain.step(int(t)))


# -- the run file ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("[]", "invalid value []; expected a list of sources, such as"),
        ("[{source: a.jsonl, weight: 0}]", "a: weight: invalid value 0; expected a number > 0"),
        (
            "[{source: a.jsonl, weight: -1}, b.csv]",
            "b has no weight but other sources have one; give a weight to every source",
        ),
        ("[{source: a.jsonl, weight: 2}, {name: web, source: b, weight: -1}]", "web: weight: invalid value -1"),
        ("[{source: a.jsonl, weight: [[0, 1], [9, 0]]}]", "a: weight: invalid value 0"),
        ("[{source: a.jsonl, weight: [[5, 1]]}]", "a: weight: invalid value [[5, 1.0]]; expected [[0, weight], [step"),
        (
            "[{source: a.jsonl, weight: [[0, 1], [9, 1], [7, 2]]}]",
            "a: weight: invalid value [[0, 1.0], [9, 1.0], [7, 2.0]]",
        ),
        ("[{source: a.jsonl, wieght: 1}]", "a: unknown key 'wieght'; did you mean weight? known are name, weight"),
        ("[{source: a.jsonl, weight: much}]", "a: weight: invalid value 'much'; share of a step's examples"),
        (
            "[{source: x/a.jsonl}, {source: y/a.jsonl}]",
            "two sources have the name a; give each source a different name",
        ),
        ("[{weight: 1}]", "source_1: no data given; set source (a Hub id, a folder or a file) or train (files)"),
        ("[{source: a, filter: {b: {}}}]", "a: filter: b: the condition is empty"),
    ],
)
def test_invalid_sources_are_named(given: str, told: str) -> None:
    with pytest.raises(RunError) as caught:
        tiny("data.source=null", f"data.sources={given}")
    assert f"data.sources: {told}" in str(caught.value)


def test_keys_of_a_source_are_refused_outside_data_sources() -> None:
    with raises("LS1130"):
        tiny("data.source=null", "data.sources=[a.jsonl]", "data.filter={a: 1}")
    with raises("LS1130"):
        tiny("data.source=b.jsonl", "data.sources=[a.jsonl]")


def test_paths_of_sources_are_found_beside_the_run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job").mkdir()
    for name in ("a.jsonl", "b.jsonl", "t.csv"):
        (tmp_path / "job" / name).write_text("")
    text = "data: {sources: [a.jsonl, {source: b.jsonl}, {train: [t.csv], name: t}]}\nmodel: {type: gpt2}\n"
    (tmp_path / "job/run.yaml").write_text(f"{text}tokenizer: {{train: bpe}}\n")
    monkeypatch.chdir(tmp_path)
    sources = load("job/run.yaml", []).data.sources
    assert sources is not None
    assert [each.source or each.train for each in sources] == ["job/a.jsonl", "job/b.jsonl", ["job/t.csv"]]
    assert [each.name for each in sources] == ["a", "b", "t"]


# -- the data --------------------------------------------------------------------------------------------------------


def feed_of(run: Run, rank: int = 0, ranks: int = 1) -> StepLoader:
    return StepLoader(make_task(Job.of(run).with_data()), share(run.micro_batches, rank, ranks), CPU)


def test_sources_of_different_formats_are_one_data_set(tmp_path: Path) -> None:
    found = prepared(mixed(tmp_path))
    assert found.facts["sources"] == {
        "names": ["web", "book", "chat"],
        # held out of each source without a split: a tenth of each label
        "rows": {"train": [54, 46, 20], "validation": [6, 4, 2]},
    }
    assert found.facts["filtered"] == {"train": 10}
    assert found.facts["labels"] == ["fear", "joy"]
    run = mixed(tmp_path, "data.test_fraction=0.1")
    assert prepared(run).facts["sources"]["rows"]["test"] == [6, 4, 2]
    feed = feed_of(mixed(tmp_path))
    words = feed.task.tokenizer.decode(feed.columns.ragged("input_ids").row(54))  # type: ignore[attr-defined]
    assert "book says" in words


def test_a_source_with_an_empty_validation_split_takes_none_from_train(tmp_path: Path) -> None:
    """The source has its own validation split; only sources without one hold out a share of train."""
    rows = {"text": [f"a {word} day" for word in ["good", "bad", "warm", "cold", "long", "short", "calm", "wild"]]}
    for name, held_out in (("web", [" ", ""]), ("book", [" ", "a fine day", "a dull day"])):
        texts_of = {"train": [f"{name} {text}" for text in rows["text"]], "validation": held_out}
        (tmp_path / name).mkdir()
        for split, some in texts_of.items():
            lines = [json.dumps({"text": text, "label": number % 2}) for number, text in enumerate(some)]
            (tmp_path / name / f"{split}.jsonl").write_text("\n".join(lines))
    sources = [{"name": name, "source": str(tmp_path / name)} for name in ("web", "book")]
    run = tiny(data={"sources": sources, "max_length": 16, "drop_missing": True})
    facts = prepared(run).facts
    assert facts["sources"]["rows"] == {"train": [8, 8], "validation": [0, 2]}
    assert facts["left_out"] == {"validation": 3}
    world = World(run)
    built, strategy, _ = build_with_feed(run, world)
    scores = evaluate(world, built, strategy, built.splits["validation"])
    assert np.isfinite(scores["loss"])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_share_the_examples_of_a_step(ranks: int, tmp_path: Path) -> None:
    run = mixed(tmp_path, "steps=40", "epochs=null", weights=(1, 1, [[0, 1], [20, 8]]))
    feeds = [feed_of(run, rank, ranks) for rank in range(ranks)]
    for step in (0, 19, 20, 39):
        parts = [feed.make(step) for feed in feeds]
        rows = feeds[0].order.step(step)
        assert sorted(row for part in parts for row in rows_in(part)) == sorted(wanted_rows(feeds[0], rows))
        assert all(part.ids.tolist() == rows.tolist() for part in parts)
    assert feeds[0].order.steps_per_epoch == -(-120 // run.batch_size)
    assert "chat " in feeds[0].mixture["mixture"]


def test_errors_name_the_source(tmp_path: Path) -> None:
    def said(*sources: dict[str, Any]) -> str:
        with pytest.raises(RunError) as caught:
            prepared(tiny(data={"sources": [*sources], "max_length": 32}))
        return str(caught.value)

    good = {"source": str(texts(tmp_path, "web", 40))}
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert said(good, {"source": str(empty)}).startswith(f"data.sources: empty: data.train: {empty} holds no example")
    absent = str(tmp_path / "absent.jsonl")
    assert said(good, {"source": absent}).startswith("data.sources: absent: data.source: no such file")
    assert said(good, {"name": "two", "train": absent}).startswith("data.sources: two: data.train: no such file")
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress((tmp_path / "web.jsonl").read_bytes())[:-20])
    assert mentions(said(good, {"source": str(cut)}), "LS2062", "data.sources", "data.train", str(cut))
    other = {"source": str(texts(tmp_path, "other", 40, label=1))}
    assert mentions(said(good, other), "LS2197", "data.sources", "'label'")
    lacking = tmp_path / "lacking.jsonl"
    lacking.write_text('{"body": "a", "label": "joy"}\n')
    told = said(good, {"source": str(lacking)})
    assert mentions(told, "LS2242", "task.text")
    assert mentions(told, "LS2242")
    assert mentions(said(good | {"rename": {"txt": "a"}}), "LS2241", "'txt'")
    none = good | {"filter": {"label": "anger"}}
    assert said(none).startswith("data.sources: web: data.filter: no row of the train split of ")
    copy = {"source": str(texts(tmp_path, "copy", 4)), "validation": str(tmp_path / "copy.jsonl")}
    with raises("LS2262"):
        prepared(tiny("data.decontaminate=true", data={"sources": [good, copy], "max_length": 32}))


@pytest.mark.parametrize("packing", [True, False])
def test_no_block_of_tokens_holds_texts_of_two_sources(packing: bool, tmp_path: Path) -> None:
    sources = [{"source": str(texts(tmp_path, name, 40))} for name in ("web", "book")]
    asked = {"name": "language_modeling", "block_size": 16, "packing": packing}
    run = tiny(task=asked, data={"sources": sources}, tokenizer={"train": "bpe", "vocab_size": 400})
    found = prepared(run)
    rows = found.facts["sources"]["rows"]
    for split, path in found.splits.items():
        columns = Columns(path)
        assert sum(rows[split]) == len(columns)
        task: Any = make_task(replace(Job.of(run), prepared=found))
        for row in range(len(columns)):
            words = task.tokenizer.decode(columns.ragged("input_ids").row(row))
            assert ("web" in words) != ("book" in words) or not {"web", "book"} & set(words.split())
            assert "book" not in words if row < rows[split][0] else "web" not in words


def test_sources_of_one_text_hold_out_their_ends(tmp_path: Path) -> None:
    words = {"web": "one two three four five ", "book": "eins zwei drei vier "}
    for name, text in words.items():
        (tmp_path / f"{name}.txt").write_text(text * 100)
    sources = [{"source": str(tmp_path / f"{name}.txt")} for name in words]
    asked = {"name": "language_modeling", "block_size": 16}
    run = tiny(task=asked, data={"sources": sources, "validation_fraction": 0.25}, tokenizer={"train": "character"})
    found = prepared(run)
    task: Any = make_task(replace(Job.of(run), prepared=found))
    for split, (start, stop) in {"train": (0.0, 0.75), "validation": (0.75, 1.0)}.items():
        rows, ends = task.splits[split].ragged("input_ids"), np.cumsum(found.facts["sources"]["rows"][split])
        assert len(ends) == 2
        for text, begin, end in zip(words.values(), [0, ends[0]], ends, strict=True):
            whole = task.tokenizer.decode(np.concatenate([rows.row(row) for row in range(begin, end)]))
            part = (text * 100)[int(start * 100 * len(text)) : int(stop * 100 * len(text))]
            assert whole.removesuffix("[SEP]") in (part, part[:-1])  # the very last token is not an input


def test_tags_and_translations_are_mixed_too(tmp_path: Path) -> None:
    from support.task_runs import TASKS

    pairs = [{"translation": {"en": f"house {i}", "de": f"Haus {i}"}} for i in range(30)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    (tmp_path / "flat.en").write_text("".join(f"dog {i}\n" for i in range(20)))
    (tmp_path / "flat.de").write_text("".join(f"Hund {i}\n" for i in range(20)))
    flat = {"train": [str(tmp_path / "flat.en"), str(tmp_path / "flat.de")], "layout": "parallel"}
    values = TASKS["translation"] | {"tokenizer": {"train": "bpe", "vocab_size": 400}}
    sources = [{"source": str(tmp_path / "pairs.jsonl")}, flat]
    found = prepared(tiny(data={"sources": sources, "max_length": 32}, **values))
    assert found.facts["sources"] == {
        "names": ["pairs", "flat"],
        "rows": {"train": [27, 18], "validation": [3, 2]},
    }
    tagged = [{"tokens": ["a", "dog"], "tags": ["O", "B-ANIMAL"], "n": i} for i in range(30)]
    for name, rows in (("x", tagged), ("y", tagged[:20])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = TASKS["token_classification"] | {"tokenizer": {"train": "bpe", "vocab_size": 400}}
    sources = [{"source": str(tmp_path / f"{name}.jsonl")} for name in ("x", "y")]
    found = prepared(tiny(data={"sources": sources, "max_length": 32}, **values))
    assert found.facts["sources"]["rows"]["train"] == [27, 18]


def test_moving_sources_keeps_the_cache_key(tmp_path: Path) -> None:
    valid = str(texts(tmp_path, "valid", 8))
    rows = [json.dumps({"text": f"it says {i}", "label": "joy" if i % 2 else "fear"}) + "\n" for i in range(60)]

    def of(folder: str, end: int) -> tuple[Run, Prepared]:
        (tmp_path / folder).mkdir()
        for name, some in (("a", rows[:end]), ("b", rows[end:])):
            (tmp_path / folder / f"{name}.jsonl").write_text("".join(some))
        sources = [{"train": str(tmp_path / f"{folder}/{name}.jsonl"), "validation": valid} for name in "ab"]
        run = tiny(data={"sources": sources, "max_length": 32})
        return run, prepared(run)

    def job(pair: tuple[Run, Prepared]) -> Job:
        return replace(Job.of(pair[0]), prepared=pair[1])

    first, moved, other = of("one", 30), of("two", 30), of("three", 40)
    assert first[1].key == moved[1].key != other[1].key
    assert sorted(first[1].splits) == sorted(other[1].splits)
    assert facts(job(first)) == facts(job(moved))
    manifest = Manifest(1, 6, arithmetic_of(first[0]), first[1].key, "ddp", 1, True, "cpu", 1, {}, {})
    assert changed(job(moved), manifest) is None
    assert "data.sources" in str(changed(job(other), manifest))
    heavier = [each.model_copy(update={"weight": 2.0}) for each in moved[0].data.sources or []]
    weighted = moved[0].model_copy(update={"data": moved[0].data.model_copy(update={"sources": heavier})})
    assert "other settings that determine the weights" in str(changed(job((weighted, moved[1])), manifest))


# -- training --------------------------------------------------------------------------------------------------------


def trained(world: World, run: Run) -> dict[str, Any]:
    """Return steps across a change of weights, scores per source, and the model's weights."""
    task, strategy, feed = build_with_feed(run, world)
    losses = [float(strategy.train_step(feed.make(t), 5e-3).loss) for t in range(6)]
    scores = evaluate(world, task, strategy, task.splits["validation"])
    weights = strategy.state.export()
    return {"losses": losses, "scores": scores, "weights": digest(weights) if weights is not None else None}


@pytest.mark.processes
def test_the_same_bits_on_one_process_and_two(tmp_path: Path) -> None:
    run = mixed(tmp_path, "strategy.name=ddp", "evaluate.batch_size=2", weights=(3, 1, [[0, 1], [3, 5]]))
    (alone,) = run_on(1, trained, run)
    both = run_on(2, trained, run)
    assert both[0] == alone
    assert both[1] | {"weights": None} == alone | {"weights": None}
    scores = alone["scores"]
    of_each = {name: scores[f"loss_{name}"] for name in ("web", "book", "chat")}
    assert len(set(of_each.values())) == 3
    mean = (6 * of_each["web"] + 4 * of_each["book"] + 2 * of_each["chat"]) / 12
    assert scores["loss"] == pytest.approx(mean, rel=1e-9)
