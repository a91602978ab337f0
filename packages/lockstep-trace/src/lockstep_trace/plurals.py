"""Numbers with their nouns in messages: "1 process", "2 processes". Imports nothing from lockstep."""


def quantity(count: float | str, noun: str) -> str:
    """Return a whole number with its noun, in the plural unless the number is 1. `count`: or a word, such as auto.
    `noun`: in the singular."""
    number = count if isinstance(count, str) else f"{count:,.0f}"
    return f"{number} {noun if number == '1' else _plural(noun)}"


def _plural(noun: str) -> str:
    if noun.endswith(("s", "x", "ch", "sh")) and noun != "epoch":
        return f"{noun}es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}s"
