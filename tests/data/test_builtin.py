import hashlib
import json
import math
import subprocess
import sys
from collections import Counter, defaultdict

import pytest

from lockstep.data import builtin
from lockstep.data.builtin import ACTS, LABELS, STATES, best_accuracy, emotion

SPLITS = {"train": 6000, "validation": 1000, "test": 1000}
RECORDED = "fed6dda14f85a6e8873d2faec436cfca0b440d46ee07afa730c15c5554002543"  # sha256 of the JSON
# The holder of a feeling is the nearest of these words to the left of the cue.
SPEAKER = {"i", "me"}
OTHERS = {name.split()[-1] for name in builtin.WOMEN + builtin.MEN} | {"she", "he"}


@pytest.fixture(scope="module")
def data():
    return emotion()


def digest(splits) -> str:
    return hashlib.sha256(json.dumps(splits).encode()).hexdigest()


CUES = {label: STATES[label] + ACTS[label] for label in LABELS}
BY_FIRST_WORD = defaultdict(list)
for _label, _name in enumerate(LABELS):
    for _cue in CUES[_name]:
        BY_FIRST_WORD[_cue.split()[0]].append((_cue.split(), _label))


def found_cues(text: str) -> list[tuple[int, int]]:
    """Return (position in words, class) of every cue in the text, without cues inside a longer one."""
    words, found, at = text.split(), [], 0
    while at < len(words):
        hits = [
            (len(cue), label) for cue, label in BY_FIRST_WORD.get(words[at], ()) if words[at : at + len(cue)] == cue
        ]
        length, label = max(hits, default=(1, None))
        if label is not None:
            found.append((at, label))
        at += length
    return found


def owner(text: str, at: int) -> str:
    return next(word for word in reversed(text.split()[:at]) if word in SPEAKER | OTHERS)


def train_bayes(columns):
    """Train naive Bayes with add-one smoothing: it knows which words occur, not whom they are about."""
    words = [Counter() for _ in LABELS]
    classes = Counter(columns["label"])
    for text, label in zip(columns["text"], columns["label"], strict=True):
        words[label].update(text.split())
    vocabulary = set().union(*words)
    totals = [sum(counts.values()) + len(vocabulary) for counts in words]

    def predict(text: str) -> int:
        def score(label: int) -> float:
            known = [word for word in text.split() if word in vocabulary]
            return math.log(classes[label]) + sum(math.log((words[label][word] + 1) / totals[label]) for word in known)

        return max(range(len(LABELS)), key=score)

    return predict


def share(predict, columns, keep=lambda text: True) -> float:
    hits = [predict(text) == label for text, label in zip(columns["text"], columns["label"], strict=True) if keep(text)]
    return sum(hits) / len(hits)


def test_seed_zero_is_the_recorded_data(data):
    assert digest(data) == RECORDED
    assert digest(emotion(seed=0)) == RECORDED
    assert digest(emotion(seed=1)) != RECORDED


@pytest.mark.processes
def test_same_data_in_a_process_with_another_hash_seed(data):
    code = (
        "import hashlib, json; from lockstep.data.builtin import emotion;"
        "print(hashlib.sha256(json.dumps(emotion()).encode()).hexdigest())"
    )
    path = ":".join(entry for entry in sys.path if entry)
    out = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "1234", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.strip() == digest(data)


def test_shape_of_the_splits(data):
    assert list(data) == list(SPLITS)
    for name, size in SPLITS.items():
        assert set(data[name]) == {"text", "label", "true_label"}
        assert all(len(column) == size for column in data[name].values())
        for column in ("label", "true_label"):
            assert set(data[name][column]) == set(range(len(LABELS)))


def test_no_text_occurs_twice(data):
    texts = [text for split in data.values() for text in split["text"]]
    assert len(set(texts)) == len(texts) == sum(SPLITS.values())


def test_repeated_draws_are_dropped(monkeypatch):
    # A generator that repeats almost every sentence: only deduplication keeps the texts distinct.
    monkeypatch.setattr(builtin, "_sentence", lambda rng, label: f"i felt it again number {rng.randrange(40)}")
    splits = emotion(train=20, validation=10, test=10)
    texts = [text for split in splits.values() for text in split["text"]]
    assert len(set(texts)) == len(texts) == 40


def test_texts_are_plain_and_ragged(data):
    lengths = []
    for text in data["train"]["text"]:
        assert set(text) <= set("abcdefghijklmnopqrstuvwxyz ")
        assert "  " not in text
        assert text == text.strip()
        lengths.append(len(text.split()))
    lengths.sort()
    assert (lengths[0], lengths[-1]) == (5, 40)
    assert 16 <= sum(lengths) / len(lengths) <= 20
    assert lengths[len(lengths) // 20] <= 8
    assert lengths[-len(lengths) // 20] >= 32


def test_class_shares(data):
    counts = Counter(data["train"]["true_label"])
    for label, percent in enumerate((25, 28, 12, 14, 13, 8)):
        assert counts[label] / 60 == pytest.approx(percent, abs=2)


def test_cues_do_not_overlap_between_classes():
    for name in LABELS:
        assert len(set(CUES[name])) == len(STATES[name]) + len(ACTS[name]) >= 20
    assert len({cue for name in LABELS for cue in CUES[name]}) == sum(len(CUES[name]) for name in LABELS)
    for label, name in enumerate(LABELS):
        for cue in CUES[name]:
            assert {hit for _, hit in found_cues(f"i was {cue} again")} == {label}


def test_true_label_is_what_the_speaker_feels(data):
    distracted = 0
    for split in data.values():
        for text, true in zip(split["text"], split["true_label"], strict=True):
            cues = found_cues(text)
            own = [label for at, label in cues if owner(text, at) in SPEAKER]
            assert own == [true], text
            foreign = [label for at, label in cues if owner(text, at) in OTHERS]
            assert len(foreign) <= 1, text
            assert true not in foreign, text
            distracted += len(foreign)
    assert 0.23 <= distracted / sum(SPLITS.values()) <= 0.30


def test_distractors_come_before_and_after(data):
    first = Counter()
    for text in data["train"]["text"]:
        cues = found_cues(text)
        if len(cues) == 2:
            first[owner(text, cues[0][0]) in SPEAKER] += 1
    assert 0.4 <= first[True] / first.total() <= 0.6


@pytest.mark.parametrize("noise", [0.06, 0.2])
def test_noise_rate(noise):
    columns = emotion(seed=3, train=20000, validation=0, test=0, noise=noise)["train"]
    assert 1 - best_accuracy(columns) == pytest.approx(noise, abs=4 * math.sqrt(noise * (1 - noise) / 20000))
    shifts = Counter(
        (label - true) % len(LABELS)
        for label, true in zip(columns["label"], columns["true_label"], strict=True)
        if label != true
    )
    wrong = shifts.total()
    for shift in range(1, len(LABELS)):
        assert shifts[shift] / wrong == pytest.approx(0.2, abs=4 * math.sqrt(0.16 / wrong))


def test_noise_zero_and_one_leave_the_texts_alone(data):
    clean, spoilt = emotion(noise=0.0), emotion(noise=1.0)
    for name in SPLITS:
        assert clean[name]["label"] == clean[name]["true_label"] == data[name]["true_label"]
        assert best_accuracy(spoilt[name]) == 0.0
        assert clean[name]["text"] == spoilt[name]["text"] == data[name]["text"]


def test_held_out_splits_do_not_change_with_the_train_size(data):
    small = emotion(train=10)
    assert small["test"] == data["test"]
    assert small["validation"] == data["validation"]
    assert small["train"]["text"] == data["train"]["text"][:10]


def test_best_accuracy_by_hand():
    columns = {"text": ["a", "b", "c", "d"], "label": [0, 1, 5, 3], "true_label": [0, 1, 2, 3]}
    assert best_accuracy(columns) == 0.75
    with pytest.raises(ValueError, match="at least one"):
        best_accuracy({"text": [], "label": [], "true_label": []})
    with pytest.raises(ValueError, match=r"shorter|longer"):
        best_accuracy({"text": ["a"], "label": [0, 1], "true_label": [0]})


@pytest.mark.parametrize("wrong", [{"train": -1}, {"noise": -0.1}, {"noise": 1.5}])
def test_refuses_impossible_arguments(wrong):
    with pytest.raises(ValueError, match=r"noise in 0\.\.1"):
        emotion(**wrong)


def test_bag_of_words_does_not_reach_the_best_accuracy(data):
    held_out = data["test"]
    predict = train_bayes(data["train"])
    best, counted = best_accuracy(held_out), share(predict, held_out)
    chance = max(Counter(held_out["label"]).values()) / len(held_out["label"])
    assert chance + 0.35 < counted < best - 0.06
    # Distractors make it hard: without one, naive Bayes is almost perfect.
    alone = share(predict, held_out, lambda text: len(found_cues(text)) == 1)
    mixed = share(predict, held_out, lambda text: len(found_cues(text)) == 2)
    assert alone > best - 0.08
    assert mixed < alone - 0.2
