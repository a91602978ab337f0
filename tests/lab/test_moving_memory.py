"""`lockstep init --from`: what changes weights under another name, comes too late, or differs on several processes."""

from pathlib import Path

from lockstep.lab.import_config import import_config
from lockstep.lab.import_config.script import Script
from lockstep.lab.import_config.table import RunDraft
from support.moving_scripts import ACCELERATE, AFTER, DDP, LOOP, QLORA, changed, in_loop

SHARED = "shares their memory"
SFT = """
from datasets import load_dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

tokenizer = AutoTokenizer.from_pretrained("acme/chat")
args = SFTConfig(output_dir="out", learning_rate=1e-4, dataset_text_field="text", max_length=64)
BEFORE
trainer = SFTTrainer("acme/chat", args, train_dataset=load_dataset("acme/notes", split="train"),
    processing_class=tokenizer)
MADE
trainer.train()
TRAINED
"""


def draft_of(text: str, processes: int | None = 1, rows: int | None = None) -> RunDraft:
    draft = RunDraft()
    draft.rows = rows
    import_config.script(Script(Path("train.py"), text)).move(draft, processes)
    for each in draft.at_end:
        each(draft)
    return draft


def test_arithmetic_in_place_on_what_is_trained_is_refused_under_any_name() -> None:
    gradients = "    seen = {}\n    for n, p in model.named_parameters():\n        seen[n] = p.grad"
    cases = (
        "for g in [p.grad for p in model.parameters()]:\n    g *= 0.5",
        f"if True:\n{gradients}\n        seen[n] *= 2",
        f"if True:\n{gradients}\n    for n in seen:\n        seen[n] /= 2",
        f"if True:\n{gradients}\n    for g in seen.values():\n        g += 1",
        f"if True:\n{gradients}\n    seen['a'][0] = 0",
        "seen = []\nfor p in model.parameters():\n    seen.append(p.grad)\nseen[0] *= 2",
        "seen = []\nfor p in model.parameters():\n    seen += [p.grad]\nfor g in seen:\n    g -= 1",
        "w = list(model.parameters())[0].data\nw *= 2",
        "w = getattr(model, 'classifier').weight.data\nw *= 2",
        "w = model.classifier.weight.grad.detach().view(-1)\nw += 1",
        "w = model.classifier.weight.float()\nw += 1",
        "w = torch.squeeze(model.classifier.weight)\nw += 1",
        "for i, (n, p) in enumerate(model.named_parameters()):\n    q = p.data\n    q *= 2",
        "def scale(w):\n    w *= 2\nscale(model.classifier.weight.data)",
        "def get():\n    return model.classifier.weight.data\nw = get()\nw *= 2",
        "class Keeper:\n    def __init__(self):\n        self.items = {}\n    def add(self, w):\n        "
        "self.items['w'] = w\n"
        "keeper = Keeper()\nkeeper.add(model.classifier.weight.data)\nkeeper.items['w'] *= 0.5",
    )
    for number, lines in enumerate(cases):
        inside = "".join(f"        {line}\n" for line in lines.splitlines())
        pair = (AFTER, inside + AFTER) if number % 2 else (LOOP, f"{lines}\n{LOOP}")
        found = in_loop(changed(pair))
        assert SHARED in found or "effect on" in found, lines


def test_sums_of_values_are_no_change_in_place() -> None:
    for lines in (
        "total = 0\ncount = 0\nfor p in model.parameters():\n    count += p.numel()\n    "
        "total += p.grad.norm().item() ** 2",
        "norms = {}\nfor n, p in model.named_parameters():\n    norms[n] = p.grad.norm()\n    norms[n] += 1",
        "copies = {n: p.detach().clone() for n, p in model.named_parameters()}\nfor n in copies:\n    copies[n] *= 0.9",
        "kept = []\nkept += [1]\nrate = optimizer.param_groups[0]['lr']\nrate *= 2",
        "size = model.config.hidden_size\nsize *= 2\nlogits = model(**batch).logits.sum().item()\nlogits += 1",
    ):
        inside = "".join(f"        {line}\n" for line in lines.splitlines())
        assert SHARED not in in_loop(changed((AFTER, inside + AFTER))), lines


def test_an_input_of_the_loss_is_not_changed_in_place_under_another_name() -> None:
    line = "        loss = model(**batch).loss\n"
    for before, after, found in (
        ("for k, v in batch.items():\n    v *= 0", "", True),
        ("for v in batch.values():\n    v += 1", "", True),
        ("seen = []\nseen.append(batch['labels'])\nseen[0] *= 0", "", True),
        ("", "seen = []\nseen.append(loss)\nseen[-1] /= 2", True),
        ("", "seen = []\nseen.append(loss.item())\nseen[-1] /= 2", False),
        ("sizes = {'a': 1}\nfor k, v in sizes.items():\n    v *= 2", "", False),
    ):
        parts = ["".join(f"        {each}\n" for each in part.splitlines()) for part in (before, after)]
        assert ("it changes an input of the loss" in in_loop(changed((line, f"{parts[0]}{line}{parts[1]}")))) is found


def test_a_setting_after_the_trainer_is_made_is_not_taken_for_the_one_it_was_made_with() -> None:
    for line in ("args.learning_rate = 1.0", "tokenizer.chat_template = 'x'", "args.max_length = 8"):
        text = SFT.replace(line.partition(" ")[0], "X")
        gaps = {}
        for place in ("BEFORE", "MADE", "TRAINED"):
            text = SFT
            for each in ("BEFORE", "MADE", "TRAINED"):
                text = text.replace(each, line if each == place else "")
            draft = draft_of(text)
            gaps[place] = [str(each) for each in draft.gaps if "after the Trainer is made" in str(each)]
            own = draft.keys["optim.learning_rate"], draft.keys["task.block_size"], draft.keys.get("task.chat_template")
            assert (own == (0.0001, 64, None)) == (place != "BEFORE"), (line, place, own)
        assert [len(gaps[place]) for place in gaps] == [0, 1, 0], line


def test_a_length_that_the_tokenizer_gets_after_the_rows_are_tokenized_is_not_theirs() -> None:
    whole = ("truncation=True, max_length=32", "truncation=True")
    for line, known in (("raw =", True), ("model =", False)):
        draft = draft_of(changed(whole, (line, f"tokenizer.model_max_length = 16\n{line}")))
        assert (draft.keys.get("data.max_length") == 16) is known
        assert any("does not show" in str(each) for each in draft.gaps) is not known


def test_a_schedule_counted_in_batches_of_a_function_s_loader_is_compared_with_its_steps() -> None:
    made = (
        "def loaders():\n    def pad(rows):\n        return tokenizer.pad(rows)\n    train = DataLoader(data['train'], "
    )
    made += "shuffle=True, batch_size=8)\n    return train, 1\n\ntrain, other = loaders()"
    text = ACCELERATE.replace('train = DataLoader(data["train"], shuffle=True, batch_size=8)', made)
    for length, right in (("len(train) * 3 // 4", True), ("len(train) * 3", False)):
        found = "\n".join(map(str, draft_of(text.replace("len(train) * 3 // 4", length)).gaps))
        assert ("the schedule's length is 3 epochs of batches" in found) is not right, found


def test_on_several_processes_a_schedule_ends_where_accelerate_lets_it_end() -> None:
    plain = ACCELERATE.replace("gradient_accumulation_steps=4, ", "").replace("len(train) * 3 // 4", "len(train) * 3")
    line = next(each for each in plain.splitlines() if each.startswith("schedule = "))
    names = "model, optimizer, train, dev"
    prepare = f"{names}, schedule = accelerator.prepare({names}, schedule)"
    later = f"{names} = accelerator.prepare({names})\n{line}"
    for text, share in (
        (plain, ""),  # counted before prepare(), advanced by Accelerate
        (
            plain.replace(
                "num_training_steps=len(train) * 3", "num_training_steps=len(train) * 3 * accelerator.num_processes"
            ),
            "2",
        ),
        (plain.replace(line, "").replace(prepare, later), ""),  # counted after, advanced by the script
        (plain.replace(line, "").replace(prepare, f"{later}\nschedule = accelerator.prepare(schedule)"), "0.5"),
        (plain.replace(prepare, f"{names} = accelerator.prepare({names})"), "2"),
    ):
        for processes in (1, 2):
            found = [str(each) for each in draft_of(text, processes).gaps if "processes the schedule" in str(each)]
            assert [f"is {share} of its run" in each for each in found] == [True] * (share != "" and processes > 1), (
                text
            )


def test_processes_that_each_train_on_all_rows_are_not_read_as_ones_that_share_them() -> None:
    prepared = "model, optimizer, train, dev, schedule = accelerator.prepare(model, optimizer, train, dev, schedule)"
    alone = "model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)"
    loader = "sampler=DistributedSampler(data)"
    for text, why in (
        (ACCELERATE, ""),
        (ACCELERATE.replace(prepared, alone), "it is not passed to prepare()"),
        (
            ACCELERATE.replace(
                prepared,
                f"parts = model, optimizer, train, dev, schedule\n{prepared.partition('=')[0]}= "
                "accelerator.prepare(*parts)",
            ),
            "",
        ),
        (DDP, ""),
        (DDP.replace(loader, "shuffle=True"), "it has no DistributedSampler"),
        (
            DDP.replace(loader, "sampler=DistributedSampler(data, num_replicas=1, rank=0)"),
            "the same num_replicas and rank",
        ),
        (DDP.replace(loader, "sampler=DistributedSampler(data, rank=torch.distributed.get_rank())"), ""),
    ):
        one, two, unknown = (draft_of(text, processes) for processes in (1, 2, None))
        notes = "\n".join((*map(str, one.gaps), *one.notes))
        assert "train on" not in notes, notes
        assert any(why in str(each) for each in two.gaps if "train" in str(each)) is bool(why) or not why
        assert any("each process trains on all rows" in str(e) or "all train on" in str(e) for e in two.gaps) is bool(
            why
        )
        assert any("is that of one process" in each for each in unknown.notes) is bool(why)


def test_the_dtype_in_which_4_bit_layers_compute_is_noted_if_it_is_another() -> None:
    usual = "bnb_4bit_compute_dtype=torch.bfloat16"
    for compute, more, noted in (
        (usual, "bf16=True", ""),
        ("bnb_4bit_compute_dtype=torch.float16", "bf16=True", "compute in float16 there, in lockstep in bfloat16"),
        ("bnb_4bit_compute_dtype='float16'", "fp16=True, bf16=False", ""),
        ("bnb_4bit_use_double_quant=False", "bf16=True", "compute in float32 there, in lockstep in bfloat16"),
    ):
        notes = [
            each for each in draft_of(QLORA.replace(usual, compute).replace("MORE", more)).notes if "4-bit" in each
        ]
        assert [noted in each for each in notes if "compute in" in each] == [True] * bool(noted), compute
