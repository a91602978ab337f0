"""`lockstep init --from`: an optimizer that has the weights of another model, and calls that act on given objects."""

from pathlib import Path

from lockstep.lab.import_config.import_config import script
from lockstep.lab.import_config.script import Script
from lockstep.lab.import_config.table import RunDraft
from support.moving_scripts import ACCELERATE, DDP, SCRIPT, changed, in_loop

OTHER, AGAIN, LATER = "weights of another model", "a second model like it", "keeps the weights"
OPTIMIZER = "optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)\n"
LOADED = 'AutoModelForSequenceClassification.from_pretrained("encoder")'
OF_OWN = "    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)\n"
FORWARD = "    def forward(self, x)"


def test_an_optimizer_of_another_model_is_refused() -> None:
    pairs: tuple[tuple[str, str, str, str], ...] = (
        (SCRIPT, OPTIMIZER, OPTIMIZER.replace("model.", f"{LOADED}."), OTHER),
        (SCRIPT, OPTIMIZER, f"import copy\n{OPTIMIZER.replace('model.', 'copy.deepcopy(model).')}", OTHER),
        (SCRIPT, OPTIMIZER, f"import copy\nother = copy.copy(model)\n{OPTIMIZER.replace('model.', 'other.')}", OTHER),
        (SCRIPT, OPTIMIZER, f"import copy\n{OPTIMIZER}model = copy.deepcopy(model)\n", LATER),
        (SCRIPT, OPTIMIZER, f"{OPTIMIZER}model = {LOADED}\n", LATER),
        (SCRIPT, OPTIMIZER, f"other = {LOADED}\n{OPTIMIZER.replace('model.', 'other.')}", AGAIN),
        (DDP, OF_OWN, OF_OWN.replace("model.", "Net(32)."), OTHER),
        (DDP, OF_OWN, f"    other = Net(8)\n{OF_OWN.replace('model.', 'other.')}", AGAIN),
        (DDP, OF_OWN, f"{OF_OWN}    model = Net(8)\n", LATER),
    )
    for text, old, new, why in pairs:
        assert why not in in_loop(text)
        assert why in in_loop(changed((old, new), text=text)), new


def test_a_model_that_is_loaded_again_to_be_tried_is_no_second_one() -> None:
    after = f"{SCRIPT}\nmodel = AutoModelForSequenceClassification.from_pretrained('out')\n"
    loaded = "    best = Net(32)\n    best.load_state_dict(torch.load('best.pt'))\n"
    own = changed(('\n\nif __name__ == "__main__"', f"{loaded}\n\nif __name__ == '__main__'"), text=DDP)
    for text in (after, own, changed((OPTIMIZER, f"import copy\nbest = copy.deepcopy(model)\n{OPTIMIZER}"))):
        assert not any(why in in_loop(text) for why in (OTHER, AGAIN, LATER)), text


def test_methods_that_say_which_weights_a_module_has_are_refused() -> None:
    for name in ("parameters", "named_parameters", "zero_grad", "eval", "state_dict"):
        text = changed((FORWARD, f"    def {name}(self, *a):\n        return []\n\n{FORWARD}"), text=DDP)
        assert f"def {name}(...) (a run calls this method" in in_loop(text)
    assert "a run calls this method" not in in_loop(
        changed((FORWARD, f"    def head(self):\n        pass\n\n{FORWARD}"), text=DDP)
    )


def test_calls_of_a_library_on_given_objects_are_no_switches() -> None:
    for call in ("torch.autograd.backward(loss)", "torch.autograd.backward(loss, torch.tensor(3.0))"):
        text = in_loop(changed(("loss.backward()", call)))
        assert f"{call} (its effect on what the script gives it is unknown)" in text
    assert "not carried over" in in_loop(f"import torch\ntorch.backends.cuda.enable_flash_sdp(False)\n{SCRIPT}")


def test_torchs_other_name_of_manual_seed_and_complex_numbers() -> None:
    draft = RunDraft()
    text = changed((OPTIMIZER, f"torch.random.manual_seed(5)\n{OPTIMIZER.replace('2e-5', '2e-5 + 0j')}"))
    script(Script(Path("train.py"), text)).move(draft, 1)
    assert draft.keys["seed"] == 5
    assert any("known only when the script runs" in str(gap) for gap in draft.gaps)


def test_a_model_and_an_optimizer_that_accelerate_does_not_prepare_are_refused() -> None:
    whole = "model, optimizer, train, dev, schedule = accelerator.prepare(model, optimizer, train, dev, schedule)"
    without = whole.replace("model, ", "")
    scaled = changed(('"bf16"', '"fp16"'), text=ACCELERATE)
    by_name = f"both = [model, optimizer]\n{without}\nmodel, optimizer = accelerator.prepare(*both)"
    wrapped = f"net = torch.compile(model)\n{whole.replace('(model,', '(net,')}"
    for text in (ACCELERATE, scaled):
        assert "prepare()" not in in_loop(text)
        for right in (by_name, wrapped):
            assert "the model is not passed" not in in_loop(changed((whole, right), text=text)), right
    assert "the model is not passed to prepare()" in in_loop(changed((whole, without), text=ACCELERATE))
    own = f"    helpers.prepare(len('rows'))\n{OF_OWN}"
    draft = RunDraft()
    script(Script(Path("train.py"), changed((OF_OWN, own), text=DDP))).move(draft, 2)
    assert not any("the model is not" in str(gap) for gap in draft.gaps), "a script without Accelerate"
    assert "gradients that are still scaled" in in_loop(changed((whole, whole.replace("optimizer, ", "")), text=scaled))
