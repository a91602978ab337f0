"""`lockstep init --from` for loops whose optimizer has parameter groups with and without decay."""

from pathlib import Path

import pytest

from support.messages import mentions
from support.moving_scripts import changed, encoder, moved, refused

ALL = "AdamW(model.parameters(), lr=2e-5)"
LINE = f"optimizer = torch.optim.{ALL}\n"
WORDS = 'plain = ["bias", "LayerNorm.weight"]\n'
WITH, WITHOUT = "not any(w in n for w in plain)", "any(w in n for w in plain)"


def grouped(
    with_decay: str, without: str, words: str = WORDS, source: str = "model.named_parameters()", more: str = ""
) -> str:
    """Return SCRIPT with two parameter groups, selected by these conditions."""
    groups = words + "groups = [\n"
    for condition, decay in ((with_decay, 0.05), (without, 0.0)):
        groups += f'    {{"params": [p for n, p in {source} if {condition}], "weight_decay": {decay}}},\n'
    return changed((LINE, f"{groups}]\n{more}optimizer = torch.optim.AdamW(groups, lr=2e-5)\n"))


LISTED = changed(
    ("model.named_parameters() if not", "weights if not"),
    ("model.named_parameters() if any", "weights if any"),
    (WORDS, f"weights = list(model.named_parameters())\n{WORDS}"),
    text=grouped(WITH, WITHOUT),
)


@pytest.mark.parametrize(
    "script",
    [
        grouped(WITH, WITHOUT),
        LISTED,
        grouped("p.requires_grad and 'bias' not in n and 'Norm' not in n", "'bias' in n or 'Norm' in n", ""),
        grouped("all(w not in n for w in plain)", f"p.requires_grad and {WITHOUT}"),
        grouped("p.dim() >= 2", "p.ndim < 2", ""),
        grouped("not (n.endswith('.bias') or n.endswith('LayerNorm.weight'))", WITHOUT),
    ],
)
def test_weights_without_decay_by_their_names(script: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encoder()
    run = moved("loop.py", script)
    assert (run.optim.weight_decay, run.optim.groups, run.optim.learning_rate) == (0.05, [], 2e-5)
    assert "decays" not in capsys.readouterr().out


def test_weights_that_only_the_script_leaves_out_are_groups(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encoder()
    plain = 'plain = ["bias", "LayerNorm.weight", "embeddings.word"]\n'
    run = moved("loop.py", grouped(WITH, WITHOUT, plain))
    assert [(group.match, group.weight_decay) for group in run.optim.groups] == [
        ("bert.embeddings.word_embeddings.weight", 0.0)
    ]
    moved("loop.py", grouped(WITH, WITHOUT, 'plain = ["bias"]\n'))
    said = "the original decays bert.embeddings.LayerNorm.weight, bert.encoder.layer.0.attention.output.LayerNorm."
    assert said in capsys.readouterr().out


def test_without_the_model_the_words_of_the_conditions_decide(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = grouped(WITH, WITHOUT).replace('"encoder"', '"acme/encoder"')
    run = moved("loop.py", script)
    assert run.optim.weight_decay == 0.05
    assert "does not decay weights with LayerNorm.weight, bias in their names" in capsys.readouterr().out
    for other in (script.replace('"bias", ', '"bias", "embed", '), script.replace(f"{WITH}]", "p.dim() >= 2]")):
        Path("moved.yaml").unlink(missing_ok=True)
        mentions(refused("loop.py", other, capsys), "LS8209", "config cannot be read", "optim.groups=")


LINE_OF_HEAD = changed((ALL, ALL.replace("model", "head")), (LINE[:9], f"head = model.classifier\n{LINE[:9]}"))


@pytest.mark.parametrize(
    ("script", "wanted"),
    [
        (grouped(WITH, "'bias' in n"), "LayerNorm.weight is in 0 of its groups"),
        (grouped("'bias' not in n", WITHOUT), "LayerNorm.weight is in 2 of its groups"),
        (grouped(WITH, WITHOUT, source="model.classifier.named_parameters()"), ": groups (groups are read if each"),
        (grouped(WITH, WITHOUT, f"w = model.named_parameters()\n{WORDS}", "w"), ": groups (groups are read if each"),
        (grouped(WITH, WITHOUT, more='groups[0]["weight_decay"] = 0.5\n'), ": groups (groups are read if each"),
        (grouped(WITH, WITHOUT, more="plain.append('query')\n"), ": groups (groups are read if each"),
        (grouped(WITH, WITHOUT).replace("0.0}", '0.01, "lr": 1e-3}'), ": groups (groups are read if each"),
        (grouped(WITH, WITHOUT).replace("0.0}", "0.01}"), "decays 0.01, 0.05: give optim.weight_decay"),
        (LINE_OF_HEAD, "line 14: head.parameters() (groups are read if each"),
    ],
)
def test_groups_that_are_not_the_same_here_are_refused(
    script: str, wanted: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    encoder()
    mentions(refused("loop.py", script, capsys), "LS8209", wanted)
