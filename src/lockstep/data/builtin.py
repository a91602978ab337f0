"""The built-in emotion data: short first-person messages from a seeded grammar, for use offline.
In: a seed, the sizes of the three splits and the share of labels to spoil.
Out: for each split the columns text, label (with noise) and true_label, equal on every Python version.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any

LABELS: tuple[str, ...] = ("sadness", "joy", "love", "anger", "fear", "surprise")
PERCENT: tuple[int, ...] = (25, 28, 12, 14, 13, 8)  # class frequencies
DISTRACTOR = 0.28  # share of messages that also mention another person's feeling
MIN_WORDS, MAX_WORDS = 5, 40


def _items(text: str) -> tuple[str, ...]:
    return tuple(" ".join(item.split()) for item in text.split(","))


# Phrases after "was" or "felt", by class. No phrase or feeling word occurs in two classes.
STATES: dict[str, tuple[str, ...]] = {
    "sadness": _items("""sad, gloomy, heartbroken, miserable, lonely, hopeless, empty inside, worthless,
        hurt, sorrowful, unhappy, defeated, homesick, weepy, crushed, tearful, discouraged, dejected,
        full of grief, melancholy, forlorn, down in the dumps"""),
    "joy": _items("""happy, thrilled, cheerful, delighted, glad, joyful, excited, proud, content, hopeful,
        pleased, elated, upbeat, blissful, jolly, ecstatic, carefree, radiant, merry, full of energy,
        over the moon, on top of the world"""),
    "love": _items("""loving, in love, adoring, affectionate, tender, devoted, smitten, fond of everyone,
        caring, romantic, passionate, enamoured, infatuated, compassionate, warm hearted, sympathetic,
        cherished, loved, besotted, lovestruck, head over heels, full of longing"""),
    "anger": _items("""angry, furious, annoyed, irritated, mad, livid, enraged, bitter, resentful, outraged,
        hostile, cross, grumpy, fuming, frustrated, offended, spiteful, infuriated, irate, vengeful, fed up,
        hot with rage"""),
    "fear": _items("""scared, afraid, terrified, anxious, nervous, worried, frightened, fearful, panicky,
        uneasy, timid, shaky, petrified, apprehensive, threatened, insecure, paranoid, spooked, tense,
        jittery, on edge, full of dread"""),
    "surprise": _items("""surprised, amazed, astonished, shocked, stunned, astounded, startled, dazed,
        speechless, curious, impressed, flabbergasted, bewildered, dumbfounded, taken aback,
        caught off guard, staggered, gobsmacked, awestruck, wide eyed, blown away, lost for words"""),
}
# Actions caused by the feeling; the form fits "i" and "my sister" alike.
ACTS: dict[str, tuple[str, ...]] = {
    "sadness": _items("""cried in the bathroom, could not stop crying, sobbed into a pillow,
        wept all evening, mourned in silence, could not hold back the tears"""),
    "joy": _items("""could not stop smiling, laughed out loud, danced around the table,
        grinned from ear to ear, whistled a happy tune, cheered and clapped"""),
    "love": _items("""wanted to hug everyone, fell in love all over again, blew kisses across the room,
        could not wait to cuddle, wrote a long love letter, swooned like a teenager"""),
    "anger": _items("""slammed the door, wanted to scream at everyone, threw the phone at the wall,
        lost all patience, snapped at the waiter, cursed and shouted"""),
    "fear": _items("""trembled all night, hid under the covers, lay awake with dread,
        could not stop shaking, froze at every noise, wanted to run and hide"""),
    "surprise": _items("""did not see it coming, gasped out loud, could not believe it,
        stared with an open mouth, blinked in disbelief, had to read it three times"""),
}

WOMEN = _items("""my sister, my mother, my aunt, my grandmother, my girlfriend, my roommate anna,
    the new manager, my teacher, our neighbour, my best friend""")
MEN = _items("""my brother, my father, my uncle, my grandfather, my boyfriend, my flatmate tom, my boss,
    my coach, the man next door, my cousin""")
I_WAS = _items("""i was, i felt, i feel, i am, i was feeling, i am feeling, i have been, i keep feeling,
    i ended up""")
SHE_WAS = _items("was, felt, is, seemed, looked, was feeling, has been, is feeling, sounded")
DEGREES = _items("""so, really, a little, quite, very, completely, rather, truly, pretty, kind of, deeply,
    a bit""")
OPENERS = _items("""honestly, well, i guess, i think, i have to say, to tell the truth, looking back,
    i must admit that, these are strange days and, im not sure why but, as far as i can tell, oh""")
TIMES = _items("""this morning, last night, on monday, after lunch, all week, since the weekend,
    before breakfast, around noon, the whole afternoon, at the end of the day, yesterday, during the break,
    two days ago, again""")
PLACES = _items("""at the office, in the kitchen, on the train, at school, in the library, by the river,
    at the gym, in the car park, on the stairs, at the market, in the waiting room, at the bus stop,
    on the phone""")
TOPICS = _items("""about the trip, about the exam results, about the new job, about the move,
    about the email, about the wedding plans, about the phone call, about the test, about the old photos,
    about the project, about the news, about what was said, about the next step, about the house""")
EVENTS = _items("""the meeting was moved to friday, the letter arrived, the bus came ten minutes later,
    the results were posted online, the neighbours painted the fence, the doctor called back,
    the package was left outside, the class ended early, the plans changed, the team picked a new captain,
    the lights went out, the lease was signed, the guests stayed for dinner, the computer restarted""")
ASIDES = _items("""we had soup for dinner, i walked to the shop, the radio was playing next door,
    i made some tea, it was raining outside, i had to finish my homework, the dishes were still in the sink,
    i took the later bus, we watched a film, i sat near the window, there were a lot of people around,
    i am writing this in my notebook, i went to bed at ten, the dog needed a walk""")
VISITS = _items("""came along, was in the other room, called from the station, made coffee,
    helped with the boxes""")
OTHER_FIRST = (("", " but "), ("", " and "), ("", " yet "), ("although ", " "), ("while ", " "), ("", " so "))
SPEAKER_FIRST = (" but ", " and ", " even though ", " while ", " because ", " though ")


def _cue(rng: random.Random, label: str) -> str:
    degree = rng.choice(DEGREES) + " " if rng.random() < 0.5 else ""
    return degree + rng.choice(STATES[label])


def _person(rng: random.Random) -> tuple[str, str]:
    return (rng.choice(WOMEN), "she") if rng.random() < 0.5 else (rng.choice(MEN), "he")


def _speaker(rng: random.Random, label: str) -> str:
    form = rng.random()
    if form < 0.25:
        return "i " + rng.choice(ACTS[label])
    if form < 0.40:
        return rng.choice(("it left me ", "it made me feel ", "that made me ")) + _cue(rng, label)
    return rng.choice(I_WAS) + " " + _cue(rng, label)


def _other(rng: random.Random, label: str) -> str:
    person, pronoun = _person(rng)
    form = rng.random()
    if form < 0.25:
        return person + " " + rng.choice(ACTS[label])
    if form < 0.40:
        return rng.choice(("it left ", "it made ", "that made ")) + person + " " + _cue(rng, label)
    if form < 0.55:
        person += " told me that " + pronoun
    return person + " " + rng.choice(SHE_WAS) + " " + _cue(rng, label)


def _details(rng: random.Random) -> str:
    """Neutral words after a feeling: topic, time, place, reason."""
    text = ""
    for options, share in ((TOPICS, 0.35), (TIMES, 0.30), (PLACES, 0.25)):
        if rng.random() < share:
            text += " " + rng.choice(options)
    if rng.random() < 0.2:
        text += rng.choice((" because ", " when ", " after ", " since ")) + rng.choice(EVENTS)
    return text


def _aside(rng: random.Random) -> str:
    if rng.random() < 0.3:
        return _person(rng)[0] + " " + rng.choice(VISITS)
    return rng.choice(ASIDES if rng.random() < 0.7 else EVENTS)


def _sentence(rng: random.Random, label: int) -> str:
    """One message whose speaker feels the given class, of any length."""
    text = _speaker(rng, LABELS[label]) + _details(rng)
    if rng.random() < DISTRACTOR:
        felt = LABELS[(label + 1 + rng.randrange(len(LABELS) - 1)) % len(LABELS)]
        other = _other(rng, felt) + _details(rng)
        if rng.random() < 0.5:
            before, between = rng.choice(OTHER_FIRST)
            text = before + other + between + text
        else:
            text = text + rng.choice(SPEAKER_FIRST) + other
    lead = rng.random()
    if lead < 0.12:
        text = rng.choice(("when ", "after ", "once ")) + rng.choice(EVENTS) + " " + text
    elif lead < 0.24:
        text = _aside(rng) + " and " + text
    elif lead < 0.50:
        text = rng.choice(OPENERS if lead < 0.40 else TIMES) + " " + text
    while rng.random() < 0.45:
        text += rng.choice((" and ", " and then ", " while ", " and now ", " and later ")) + _aside(rng)
    return text


def _true_label(rng: random.Random) -> int:
    point = rng.randrange(sum(PERCENT))
    return next(label for label in range(len(PERCENT)) if point < sum(PERCENT[: label + 1]))


def _split(rng: random.Random, size: int, noise: float, texts_drawn: set[str]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {"text": [], "label": [], "true_label": []}
    while len(columns["text"]) < size:
        true = _true_label(rng)
        text = _sentence(rng, true)
        # Drawn even when not used, so that the texts of a seed do not depend on the noise.
        spoilt, wrong = rng.random() < noise, (true + 1 + rng.randrange(len(LABELS) - 1)) % len(LABELS)
        if text in texts_drawn or not MIN_WORDS <= len(text.split()) <= MAX_WORDS:
            continue
        texts_drawn.add(text)
        columns["text"].append(text)
        columns["label"].append(wrong if spoilt else true)
        columns["true_label"].append(true)
    return columns


def emotion(
    seed: int = 0, train: int = 6000, validation: int = 1000, test: int = 1000, noise: float = 0.06
) -> dict[str, dict[str, list[Any]]]:
    """Generate the three splits for a seed. No text occurs in two splits; test does not depend on the other sizes."""
    if min(train, validation, test) < 0 or not 0 <= noise <= 1:
        raise ValueError(f"sizes must be >= 0 and noise in 0..1: {train}, {validation}, {test}, {noise}")
    rng = random.Random(seed)
    texts_drawn: set[str] = set()
    held_out = _split(rng, test, noise, texts_drawn)
    checked = _split(rng, validation, noise, texts_drawn)
    return {"train": _split(rng, train, noise, texts_drawn), "validation": checked, "test": held_out}


def best_accuracy(columns: Mapping[str, Sequence[Any]]) -> float:
    """Accuracy of always predicting the true class: the share of labels without noise."""
    pairs = list(zip(columns["label"], columns["true_label"], strict=True))
    if not pairs:
        raise ValueError("best_accuracy needs at least one example")
    return sum(1 for label, true in pairs if label == true) / len(pairs)
