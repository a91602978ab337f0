"""`lockstep init --from` for loops: the model's mode, and settings that the loop takes from the model implicitly."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel

from lockstep.lab.import_config.model_defaults import without_dropout
from lockstep.lab.import_config.table import RunDraft
from support.messages import mentions
from support.moving_scripts import AFTER, DPO, LOOP, MODE, SCORE, SCRIPT, changed, encoder, moved, refused

NEVER = changed((MODE, ""), (SCORE, ""))
RESTORED = ("    model.eval()\n", "    was = model.training\n    model.eval()\n")
TRAINED = {
    "each epoch": SCRIPT,
    "by an argument": changed((MODE, "    model.train(True)\n")),
    "in the loop": changed((MODE, ""), ("        loss = model", "        model.train()\n        loss = model")),
    "scored within": changed(
        (AFTER, f"{AFTER}        if i % 10 == 0:\n            score()\n            model.train()\n")
    ),
    "restored": changed(
        (MODE, ""), (LOOP, f"model.train()\n{LOOP}"), RESTORED, ("print(right)", "print(right)\n    model.train(was)")
    ),
    "a teacher": changed((LOOP, f"teacher = torch.nn.Linear(2, 2)\nteacher.eval()\n{LOOP}")),
}
PARTLY = "some modules of the model are trained in evaluation mode"
NEXT = "the next batches are trained in evaluation mode"
MIXED = {
    "after the first epoch": (
        changed((MODE, ""), (SCORE, f"{SCORE}    model.train()\n")),
        "model.train() (the batches",
    ),
    "after the first batch": (
        changed((MODE, ""), (SCORE, ""), (AFTER, f"{AFTER}        model.train()\n")),
        "before it",
    ),
    "in a branch": (changed((MODE, "    if batch_size > 3:\n        model.train()\n")), "model.train() (the batches"),
    "by the epoch": (changed((MODE, "    model.train(epoch > 0)\n")), f"model.train(epoch > 0) ({NEXT}"),
    "in an expression": (changed((MODE, "    model.train() if epoch else model.eval()\n")), f"model.eval() ({NEXT}"),
    "scored within": (
        changed((AFTER, f"{AFTER}        if i % 10 == 0:\n            score()\n")),
        f"model.eval() ({NEXT}",
    ),
    "an early return": (
        changed(
            (MODE, ""),
            (LOOP, f"model.train()\n{LOOP}"),
            ("    print(right)", "    if right == 4:\n        return\n    model.train()"),
        ),
        f"model.eval() ({NEXT}",
    ),
    "an encoder": (changed((MODE, f"{MODE}    model.bert.eval()\n")), f"model.bert.eval() ({PARTLY}"),
    "each module": (changed((MODE, f"{MODE}    for m in model.modules():\n        m.eval()\n")), f"m.eval() ({PARTLY}"),
}


@pytest.mark.parametrize("name", TRAINED)
def test_a_model_in_training_mode_keeps_its_dropout(name: str, here: Path) -> None:
    encoder()
    assert moved("loop.py", TRAINED[name]).model.config == {}


@pytest.mark.parametrize("text", [NEVER, changed((LOOP, f"model.eval()\n{LOOP}"), text=NEVER)])
def test_a_model_in_evaluation_mode_trains_without_dropout(text: str, here: Path) -> None:
    encoder()
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    assert moved("loop.py", text).model.config == rates


@pytest.mark.parametrize("name", MIXED)
def test_a_model_in_both_modes_is_refused(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, why = MIXED[name]
    assert mentions(refused("loop.py", text, capsys), "LS8209", why)


def test_model_with_unknown_dropout_rates(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = NEVER.replace('"encoder"', '"acme/encoder"')
    assert mentions(refused("loop.py", text, capsys), "LS8209", "no model.train()", "model.config=...")
    given = moved("loop.py", text, "model.config={hidden_dropout_prob: 0.0}").model.config
    assert given == {"hidden_dropout_prob": 0.0}


FAMILIES = ("bert", "distilbert", "deberta-v2", "gpt2", "t5", "bart", "electra", "llama", "mpnet", "vit")


@pytest.mark.parametrize("family", FAMILIES)
def test_families_have_no_dropout_left(family: str, here: Path) -> None:
    """Training-mode outputs with these entries equal evaluation-mode outputs without them."""
    config = AutoConfig.for_model(family)
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    own = {"d_model": 8, "d_ff": 8, "dim": 8, "hidden_dim": 8, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "d_kv": 4}
    layers = {"encoder_layers": 1, "decoder_layers": 1, "num_layers": 1, "num_decoder_layers": 1, "n_layers": 1}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_heads": 2, "n_heads": 2}
    more = {"embedding_size": 8, "vocab_size": 60, "num_key_value_heads": 2, "n_embd": 8, "n_layer": 1, "n_head": 2}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1}
    for name, value in {**small, **own, **layers, **heads, **more, **ids}.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    config.save_pretrained("model")
    draft = RunDraft(keys={"model.source": "model"})
    assert without_dropout(draft, "line 1")
    plain = AutoConfig.from_pretrained("model")
    inputs = {"input_ids": torch.arange(3, 9)[None]}
    if family == "vit":
        inputs = {"pixel_values": torch.randn(1, 3, plain.image_size, plain.image_size)}
    model = AutoModel.from_config(plain)
    entries = draft.keys.get("model.config", {})
    other = AutoModel.from_config(AutoConfig.from_pretrained("model", **entries))
    other.load_state_dict(model.state_dict())
    if family in ("t5", "bart"):
        inputs["decoder_input_ids"] = inputs["input_ids"]
    assert torch.equal(model.eval()(**inputs)[0], other.train()(**inputs)[0])
    if entries:  # the control
        assert not torch.equal(model.eval()(**inputs)[0], model.train()(**inputs)[0])


def test_batch_statistics_are_refused(here: Path) -> None:
    AutoConfig.for_model("resnet", embedding_size=8, hidden_sizes=[8], depths=[1]).save_pretrained("model")
    draft = RunDraft(keys={"model.source": "model"})
    assert not without_dropout(draft, "line 1")
    assert "BatchNorm2d" in str(draft.gaps)


def test_pairs_of_trl_are_trained_without_dropout(here: Path) -> None:
    AutoConfig.for_model("gpt2", n_embd=8, n_layer=1, n_head=2, vocab_size=60).save_pretrained("chat")
    assert moved("dpo.py", DPO.replace("acme/chat", "chat"), "--partial").model.config["resid_pdrop"] == 0.0


def test_saved_dtype_and_tokenizer_settings_are_read(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encoder(torch.bfloat16)
    assert moved("loop.py", SCRIPT).model.dtype == "float32"
    assert "keeps the weights in bfloat16" in " ".join(capsys.readouterr().out.split())
    moved("loop.py", changed(('from_pretrained("encoder")\nopt', 'from_pretrained("encoder", dtype="float32")\nopt')))
    assert "keeps the weights" not in capsys.readouterr().out
    file = Path("encoder/tokenizer_config.json")
    file.write_text(file.read_text().replace("{", '{"padding_side": "left",', 1))
    Path("moved.yaml").unlink()
    assert mentions(refused("loop.py", SCRIPT, capsys), "LS8209", "line 7", "padding_side is left")
    moved("loop.py", changed(("raw =", "tokenizer.padding_side = 'right'\nraw =")))
