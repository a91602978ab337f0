"""`lockstep init --from` for loops understands the statements of a closed list, and refuses others by line."""

import ast
import json
import time
from pathlib import Path

import pytest

from lockstep.lab.import_config.script import Script
from support.messages import mentions
from support.moving_scripts import ACCELERATE, DDP, TRAINER, USUAL, moved, refused

LOOP = "        for x, y in loader:\n"
ZERO = "            optimizer.zero_grad()\n"
OUT = "            out = model(x)\n"
LOSS = "            loss = criterion(out, y)\n"
BACK = "            loss.backward()\n"
STEP = "            optimizer.step()\n"
COUNTED = (LOOP, "        for i, (x, y) in enumerate(loader):\n")


def changed(text: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new, 1)
    return text


def accumulating(condition: str, divisor: str = " / 4") -> str:
    step = f"            if {condition}:\n                optimizer.step()\n                optimizer.zero_grad()\n"
    return changed(DDP, COUNTED, (ZERO, ""), (BACK, f"            loss = loss{divisor}\n{BACK}"), (STEP, step))


def by_hand(condition: str, before: bool) -> str:
    """Return a loop that accumulates by its own counter, incremented before the step or after it."""
    text = changed(accumulating(condition), ("    for epoch", "    n = 0\n    for epoch"))
    raised = "            n += 1\n"
    if before:
        return changed(text, (BACK, BACK + raised))
    return changed(
        text, ("                optimizer.zero_grad()\n", f"                optimizer.zero_grad()\n{raised}")
    )


SCORE = """def score(model, loader):
    model.eval()
    right = 0
    with torch.no_grad():
        for x, y in loader:
            right += (model(x).argmax(1) == y).float().sum().item()
    print("accuracy", right / len(loader.dataset))


"""
UNDERSTOOD = {
    "batch": changed(DDP, (LOOP, "        for batch in loader:\n            x, y = batch\n")),
    "device": changed(DDP, (ZERO, f"            x, y = x.to('cpu'), y.to('cpu')\n{ZERO}")),
    "logging": changed(
        DDP,
        (LOOP, f"        total = 0.0\n{LOOP}"),
        (STEP, f"{STEP}            total += loss.item()\n        print(total)\n"),
    ),
    "bar": changed(
        DDP,
        ("import torch\n", "import torch\nfrom tqdm import tqdm\n"),
        (LOOP, "        bar = tqdm(loader)\n        for x, y in bar:\n"),
        (STEP, f"{STEP}            bar.set_description(f'{{loss.item():.3f}}')\n"),
    ),
    "every": changed(DDP, COUNTED, (STEP, f"{STEP}            if i % 10 == 0:\n                print(loss.item())\n")),
    "score": changed(
        DDP,
        ("def main", f"{SCORE}def main"),
        (LOOP, f"        model.train()\n{LOOP}"),
        (STEP, f"{STEP}        score(model, loader)\n"),
    ),
    "saved": changed(DDP, (STEP, f"{STEP}        torch.save(model.state_dict(), 'net.pt')\n")),
    "other name": changed(
        DDP,
        ("for epoch in range(args.epochs)", "for e in range(1, args.epochs + 1)"),
        ("set_epoch(epoch)", "set_epoch(e)"),
    ),
}


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_statements_that_change_no_weight_are_understood(name: str, here: Path) -> None:
    run = moved("points.py", UNDERSTOOD[name])
    assert (run.epochs, run.batch_size, run.micro_batches) == (4, 20, 1)


@pytest.mark.parametrize(
    "text",
    [
        accumulating("(i + 1) % 4 == 0"),
        accumulating("(i + 1) % 4 == 0 or i + 1 == len(loader)"),
        changed(accumulating("(i + 1) % accum == 0", " / accum"), ("    data =", "    accum = 4\n    data =")),
        changed(accumulating("i % 4 == 0"), ("enumerate(loader)", "enumerate(loader, start=1)")),
        by_hand("n % 4 == 0", before=True),
        by_hand("(n + 1) % 4 == 0", before=False),
        changed(by_hand("n % 4 == 0", before=True), ("    n = 0\n", ""), (COUNTED[1], f"        n = 0\n{COUNTED[1]}")),
    ],
)
def test_accumulation_by_a_condition(text: str, here: Path) -> None:
    run = moved("points.py", text, "epochs=4")  # by hand: how an epoch ends is another there
    assert (run.batch_size, run.micro_batches, run.task.options["loss"]) == (80, 4, "torch.nn.CrossEntropyLoss")


TWISTS = {
    "not divided": (accumulating("(i + 1) % 4 == 0", ""), "not divided by 4"),
    "divided by others": (accumulating("(i + 1) % 4 == 0", " / 2"), "divided by 2, and a step has 4 batches"),
    "first batch": (accumulating("i % 4 == 0"), "i % 4 == 0 (the batches per step"),
    "own counter, first batch": (by_hand("n % 4 == 0", before=False), "n % 4 == 0 (the batches per step"),
    "own counter, by two": (changed(by_hand("n % 4 == 0", True), ("n += 1", "n += 2")), "n % 4 == 0 (the batches per"),
    "own counter, from one": (changed(by_hand("n % 4 == 0", True), ("n = 0", "n = 1")), "n % 4 == 0 (the batches per"),
    "own counter, sometimes": (
        changed(
            by_hand("n % 4 == 0", True),
            ("            n += 1\n", "            if len(x) > 3:\n                n += 1\n"),
        ),
        "n % 4 == 0 (the batches per step",
    ),
    "own counter, set back": (
        changed(
            by_hand("n % 4 == 0", True),
            ("                optimizer.step()\n", "                optimizer.step()\n                n = 1\n"),
        ),
        "n % 4 == 0 (the batches per step",
    ),
    "rate": (
        changed(DDP, (LOOP, f"        for g in optimizer.param_groups:\n            g['lr'] = 0.1\n{LOOP}")),
        "g['lr'] = 0.1",
    ),
    "term": (changed(DDP, (BACK, f"            loss = loss + 0.01 * out.mean()\n{BACK}")), "loss + 0.01 * out.mean()"),
    "added term": (changed(DDP, (BACK, f"            loss += 0.01 * out.mean()\n{BACK}")), "loss += 0.01"),
    "clamp": (
        changed(DDP, (BACK, f"{BACK}            for p in model.parameters():\n                p.grad.clamp_(-1, 1)\n")),
        "p.grad.clamp_(-1, 1)",
    ),
    "break": (changed(DDP, (STEP, f"{STEP}            if loss < 0.1:\n                break\n")), "break"),
    "epochs' break": (changed(DDP, (STEP, f"{STEP}        if epoch == 1:\n            break\n")), "break"),
    "continue": (changed(DDP, (ZERO, f"            if len(x) < 20:\n                continue\n{ZERO}")), "continue"),
    "eval": (
        changed(DDP, ("    for epoch", "    model.eval()\n    for epoch")),
        "model.eval() (the script",
    ),
    "labels": (changed(DDP, (ZERO, f"            y = 2 - y\n{ZERO}")), "y = 2 - y"),
    "labels in place": (changed(DDP, (ZERO, f"            y[y == 2] = 0\n{ZERO}")), "y[y == 2] = 0"),
    "eval after": (
        changed(DDP, ("def main", f"{SCORE}def main"), (STEP, f"{STEP}        score(model, loader)\n")),
        "model.eval() (the next batches are trained in evaluation mode",
    ),
    "eval within": (
        changed(DDP, (LOOP, f"        model.train()\n{LOOP}"), (STEP, f"{STEP}            model.eval()\n")),
        "model.eval() (the next batches are trained in evaluation mode",
    ),
    "pruned": (
        changed(
            DDP, ("    criterion", "    nn.utils.prune.l1_unstructured(model.layers[0], 'weight', 0.5)\n    criterion")
        ),
        "l1_unstructured(model.layers[0]",
    ),
    "more rows": (changed(DDP, ("    criterion", "    data.x.append(0)\n    criterion")), "data.x.append(0)"),
    "groups": (
        changed(DDP, ("    criterion", "    optimizer.param_groups.append({})\n    criterion")),
        "optimizer.param_groups.append({})",
    ),
    "layer": (
        changed(DDP, ("    criterion", "    model.layers[0] = nn.Linear(4, 32)\n    criterion")),
        "model.layers[0] = nn.Linear(4, 32)",
    ),
    "new weights": (
        changed(DDP, (LOOP, f"        model = Net(32)\n{LOOP}")),
        "model = Net(32) (it changes an input of the loss",
    ),
    "swapped": (changed(DDP, (LOOP, "        for y, x in loader:\n")), "out = model(x)"),
    "noise": (changed(DDP, (ZERO, f"            x = x + torch.randn_like(x)\n{ZERO}")), "x + torch.randn_like(x)"),
    "outputs": (changed(DDP, (OUT, "            out = model(x).tanh()\n")), "model(x).tanh()"),
    "dtype": (changed(DDP, (ZERO, f"            x = x.to(torch.float64)\n{ZERO}")), "x.to(torch.float64)"),
    "order": (changed(DDP, ("sampler=DistributedSampler(data)", "shuffle=False")), "uses the data's order"),
    "order by default": (changed(DDP, (", sampler=DistributedSampler(data)", "")), "uses the data's order"),
    "sampler's order": (changed(DDP, ("Sampler(data)", "Sampler(data, shuffle=False)")), "uses the data's order"),
    "not cleared": (changed(DDP, (ZERO, "")), "no zero_grad() is in this loop"),
    "data": (changed(DDP, ("    criterion =", "    data.y = 1 - data.y\n    criterion =")), "data.y = 1 - data.y"),
    "own function": (
        changed(
            DDP,
            ("def main", "def init(net):\n    net.layers[0].weight.data.zero_()\n\n\ndef main"),
            ("    criterion =", "    init(model)\n    criterion ="),
        ),
        "init(model)",
    ),
    "sometimes": (
        changed(DDP, (STEP, "            if epoch % 2:\n                optimizer.step()\n")),
        "epoch % 2 (the batches",
    ),
    "twice": (changed(DDP, (STEP, STEP + STEP)), "a second step in the loop"),
    "part": (changed(DDP, ("model.parameters()", "model.layers[2].parameters()")), "model.layers[2].parameters()"),
    "positional": (changed(DDP, ("lr=args.lr", "0.1, beta")), "SGD(momentum=beta)"),
    "more": (changed(DDP, ("lr=args.lr", "lr=0.1, **more")), "SGD(**more)"),
    "loops": (changed(DDP, ("    for epoch", "    for round in range(2):\n     for epoch")), "range("),
}


@pytest.mark.parametrize("name", TWISTS)
def test_changed_loops_are_refused_with_their_line(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, wanted = TWISTS[name]
    assert wanted in refused("points.py", text, capsys)


def test_positional_momentum_is_read(here: Path) -> None:
    assert moved("points.py", changed(DDP, ("lr=args.lr", "0.1, 0.9"))).optim.momentum == 0.9


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        ("model(**batch).loss", "model(**batch).loss + 0.1", "loss = model(**batch).loss + 0.1"),
        (
            "            loss = model",
            "            batch['labels'] = 1 - batch['labels']\n            loss = model",
            "1 - batch",
        ),
        (
            "accelerator.backward",
            "model.bert.layers[0] = None\n            accelerator.backward",
            "model.bert.layers[0] =",
        ),
        ("accelerator.backward", "model.bias.data += 1\n            accelerator.backward", "model.bias.data += 1"),
        ("model.parameters()", "model.classifier.parameters()", "model.classifier.parameters()"),
        (
            "            schedule.step()\n",
            "            schedule.step()\n            schedule.step()\n",
            "second scheduler",
        ),
    ],
)
def test_changed_accelerate_loops_are_refused(
    old: str, new: str, wanted: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert wanted in refused("acc.py", changed(ACCELERATE, (old, new)), capsys)


def test_names_of_labels_are_not_lost(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = 'Classification.from_pretrained("acme/encoder"'
    run = moved("acc.py", changed(ACCELERATE, (load, f"{load}, id2label={{0: 'no', 1: 'yes'}}")))
    assert run.task.options["label_names"] == ["no", "yes"]
    run = moved("acc.py", changed(ACCELERATE, (load, f"{load}, label2id={{'no': 0, 'yes': 1}}")))
    assert run.task.options["label_names"] == ["no", "yes"]
    of_data = changed(ACCELERATE, (load, f"{load}, id2label=dict(enumerate(names))"))
    moved("acc.py", changed(of_data, ("train =", "names = raw['train'].features['label'].names\ntrain =")))
    assert "label_names" not in (here / "moved.yaml").read_text()
    rows = "".join(f'{{"first": "word {i}", "second": "b", "label": "{("bad", "good")[i % 2]}"}}\n' for i in range(64))
    (here / "a.jsonl").write_text(rows)
    local = 'load_dataset("json", data_files={"train": "a.jsonl", "validation": "a.jsonl"})'
    of_texts = changed(
        ACCELERATE, (load, f"{load}, id2label={{0: 'no', 1: 'yes'}}"), ('load_dataset("acme/pairs")', local)
    )
    assert moved("acc.py", of_texts).task.options["label_names"] is None  # which plan would refuse
    assert "the labels of the data are texts" in capsys.readouterr().out
    (here / "moved.yaml").unlink()
    said = refused("acc.py", changed(ACCELERATE, (load, f"{load}, id2label=names")), capsys)
    assert "from_pretrained(id2label=names) (labels have the data's names" in said
    assert "task.label_names=..." in said
    later = changed(ACCELERATE, ("optimizer = torch", "model.config.id2label = names\noptimizer = torch"))
    assert "model.config.id2label = names (labels have the data's names" in refused("acc.py", later, capsys)
    assert "subfolder=a" in refused("acc.py", changed(ACCELERATE, (load, f"{load}, subfolder='a'")), capsys)


def doubled(first: str, each: str) -> str:
    """Return sixty names, each of which doubles the previous one."""
    return f"a0 = {first}\n" + "".join(f"a{i + 1} = {each.replace('@', f'a{i}')}\n" for i in range(60)) + "N = a60\n"


@pytest.mark.parametrize(
    "constant",
    [
        "N = 10**10**10\n",
        "N = 'a' * 10**12\n",
        "N = f'{1:1000000000}'\n",
        doubled("[1]", "@ + @"),
        doubled("[1]", "[@, @]"),
        doubled("'x'", "f'{@}{@}'"),
        doubled("unknown()", "@ or @"),
    ],
)
def test_constants_are_folded_within_bounds(constant: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun = time.monotonic()
    said = refused(
        "points.py", changed(DDP, ("class Net", f"{constant}class Net"), ("batch_size=20", "batch_size=N")), capsys
    )
    assert "DataLoader(batch_size=N)" in said
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize("sign", ["+", "-", "~", "~-", "not "])
def test_signs_of_constants_are_python_s(sign: str, here: Path) -> None:
    script = Script(Path("a.py"), f"N = {sign}20")
    assert script.known(ast.parse("N", mode="eval").body) == eval(f"{sign}20")


@pytest.mark.parametrize(
    "code",
    ["if n == 0: pass\n" + "".join(f"elif n == {i}: pass\n" for i in range(3000)), f"n = {'-' * 50000}1\n"],
    ids=["elif", "minus"],
)
def test_a_script_that_is_nested_too_deeply(code: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert mentions(refused("points.py", f"n = 0\n{code}{DDP}", capsys), "LS8550", "points.py")


def test_a_file_of_options_that_is_nested_too_deeply(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deep = "[" * 60_000 + "]" * 60_000
    text = refused("args.json", f'{{"learning_rate": {deep}}}', capsys)
    assert mentions(text, "LS8550", "args.json", "lists or objects")
    assert "elif" not in text


def test_functions_that_call_each_other_are_followed_within_bounds(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def script(count: int, calls: int) -> str:
        called = [" + ".join([f"f{min(i + 1, count)}(x)"] * calls) for i in range(count)]
        functions = "".join(f"def f{i}(x):\n    return {each}\n" for i, each in enumerate(called))
        return (
            f"{functions}def f{count}(x):\n    return x\n{changed(DDP, (LOOP, LOOP + '            f0(1)' + chr(10)))}"
        )

    assert mentions(refused("points.py", script(300, 1), capsys), "LS8550", "functions that call each other")
    assert mentions(refused("points.py", script(5_000, 1), capsys), "LS8553", "10,000")
    began = time.process_time()
    moved("points.py", script(30, 4))  # 4 ** 19 calls, if each were followed
    assert time.process_time() - began < 20


@pytest.mark.parametrize(("name", "code"), [("run.toml", "LS8552"), ("run.ipynb", "LS8558")])
def test_files_of_other_kinds_are_called_so(
    name: str, code: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mentions(refused(name, "base_model: gpt2\n", capsys), code, name)
    late = "def late():\n    print(rate)\n    global rate\n"  # which Python's parser takes, and its compiler does not
    assert mentions(refused("late.py", late, capsys), "LS8230", "late.py, line 3: name 'rate' is used prior to global")


def test_an_option_that_is_no_yaml_is_a_text(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert mentions(refused("train.sh", f"python train.py --name={'{' * 50}\n", capsys), "LS8191", "train.py")


# -- files that a file names, and settings by a share ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("warmup", "share"),
    [("int(0.1 * total)", 0.1), ("total // 20", 0.05), ("int(total * RATIO)", 0.2), ("int(0.1 * other)", None)],
)
def test_warmup_as_a_share_of_all_steps_is_read(
    warmup: str, share: float | None, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = changed(
        ACCELERATE,
        ("schedule = ", "RATIO = 0.2\ntotal = len(train) * 3 // 4\nother = len(dev) * 3\nschedule = "),
        ("num_warmup_steps=100", f"num_warmup_steps={warmup}"),
        ("num_training_steps=len(train) * 3 // 4", "num_training_steps=total"),
    )
    if share is None:
        assert "optim.warmup_fraction=..." in refused("acc.py", text, capsys)
        return
    assert moved("acc.py", text).optim.warmup_fraction == share


def test_a_file_of_deepspeed_that_a_file_names(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "deepspeed: ds.json\nper_device_train_batch_size: 4\nlearning_rate: 1.0e-4\n"
    said = refused("args.yaml", text, capsys, "--task", "classification")
    assert "deepspeed: ds.json (the file is missing" in said
    assert "moves it" not in said
    values = {"zero_optimization": {"stage": 0}, "gradient_clipping": 0.5, "train_batch_size": "auto"}
    (here / "ds.json").write_text(json.dumps(values))
    run = moved("args.yaml", text, "--task", "classification")
    assert (run.strategy.name, run.optim.max_grad_norm, run.batch_size) == ("ddp", 0.5, 4)


def test_functions_that_change_the_model_of_a_trainer_script_are_refused(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = changed(
        TRAINER.replace("ARGUMENTS", USUAL),
        ("def compute_metrics", "def prune(m):\n    m.head.data.zero_()\n\nprune(model)\n\ndef compute_metrics"),
    )
    assert "prune(model) (its effect on its arguments" in refused("train.py", text, capsys)
    moved("train.py", text.replace("m.head.data.zero_()", "print(sum(p.numel() for p in m.parameters()))"))


def test_a_message_cites_no_line_of_a_file_that_is_not_there(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused("points.py", DDP, capsys, "data.source=x/y")
    assert mentions(said, "LS1119", "data.source")
    assert "moved.yaml" not in said


def test_all_that_a_file_of_trl_lacks_is_listed_at_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "use_peft: true\nmodel_name_or_path: a/b\nload_in_8bit: true\n"
    said = refused("trl.yaml", text, capsys)
    assert mentions(said, "LS8240", "--task language_modeling", "load_in_8bit", "model.quantization=...")
    assert "language_modeling: not understood: the columns" in said
    said = refused("trl.yaml", text, capsys, "task.text=body", "model.quantization=nf4")
    assert "also missing" not in said
