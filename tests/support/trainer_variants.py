"""Variants of a script with a Trainer: changes that affect training, and others. Named by the change."""

from __future__ import annotations

from support.moving_scripts import QLORA, TRAINER, USUAL

TRAINED = (
    TRAINER.replace("ARGUMENTS", USUAL)
    .replace('data["test"]', 'data["validation"]')
    .replace('raise SystemExit("executed")\n', "")
)
TUNED = QLORA.replace("MORE", "")
MAKES = "trainer = Trainer("
SETS = "args = Training"
TRAINS = "trainer.train()"
METRICS = "def compute_metrics"
COLLATOR = "data_collator=DataCollatorWithPadding(tokenizer)"
CALLBACKS = "callbacks=[EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=0.01)]"
TOKENS = '    return tokenizer(rows["review"], truncation=True, max_length=256)'
RENAMED = '.rename_column("stars", "labels")'
TOKENISED = '    out = tokenizer(rows["review"], truncation=True, max_length=256)\n'


def changed(text: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, new, 1)
    return text


def before(place: str, code: str, *more: tuple[str, str]) -> str:
    return changed(TRAINED, (place, f"{code}\n{place}"), *more)


def labelled(value: str, *more: tuple[str, str]) -> str:
    code = f'{TOKENISED}    out["labels"] = {value}\n    return out'
    return changed(TRAINED, (TOKENS, code), (RENAMED, ""), *more)


def subclass(methods: str, base: str = "Trainer") -> str:
    return before(METRICS, f"class Own({base}):\n{methods}\n", (MAKES, "trainer = Own("))


CALLBACK = (
    "class NAME(TrainerCallback):\n    def on_step_end(self, args, state, control, model=None, **more):\n"
    "        model.classifier.weight.data.mul_(0.99)\n"
)
WRAPPED = (
    "class Wrapped(torch.nn.Module):\n    def __init__(self, inner):\n        super().__init__()\n"
    "        self.inner = inner\n\n    def forward(self, **inputs):\n        out = self.inner(**inputs)\n"
    "        out.loss = out.loss**2\n        return out\n"
)
IN_MAIN = changed(TRAINED, ("data = load_dataset", "MAIN\ndata = load_dataset")).partition("MAIN\n")
MAIN = (
    IN_MAIN[0]
    + "def main():\n"
    + "".join(f"    {line}\n" if line else "\n" for line in IN_MAIN[2].splitlines())
    + '\nif __name__ == "__main__":\n    main()\n'
)

CHANGING: dict[str, str] = {
    # used while writing the reader
    "loss in a subclass of a subclass": before(
        METRICS,
        "class Base(Trainer):\n    pass\n\nclass Own(Base):\n    def compute_loss(self, model, inputs, **more):\n"
        "        return model(**inputs).loss * 2\n",
        (MAKES, "trainer = Own("),
    ),
    "an override that is on no list": subclass(
        "    def _prepare_inputs(self, inputs):\n        inputs['input_ids'][:, 0] = 0\n        return inputs"
    ),
    "callbacks that are appended": before(
        SETS,
        f"{CALLBACK.replace('NAME', 'Shake')}\nwatching = []\nwatching.append(Shake())",
        (CALLBACKS, "callbacks=watching"),
    ),
    "a collator by partial": before(
        METRICS,
        "def collate(tokens, rows):\n    return tokens.pad(rows)\n",
        (COLLATOR, "data_collator=partial(collate, tokenizer)"),
    ),
    "labels that are computed": labelled('[4 - star for star in rows["stars"]]'),
    "texts that are turned round": changed(
        TRAINED, (TOKENS, f'    rows["review"] = [each[::-1] for each in rows["review"]]\n{TOKENS}')
    ),
    "weights drawn anew": before(METRICS, "torch.nn.init.zeros_(model.classifier.weight)"),
    "a method put into Trainer": before(
        METRICS, "Trainer.compute_loss = lambda self, model, inputs: model(**inputs).loss.sqrt()"
    ),
    "arguments set by a method": before(MAKES, "args.set_optimizer(name='sgd', learning_rate=0.1)"),
    "trained in a loop": changed(TRAINED, (TRAINS, f"for fold in range(3):\n    {TRAINS}")),
    # held out until it was finished
    "a model of its own": before(METRICS, WRAPPED, ("Trainer(model=model", "Trainer(model=Wrapped(model)")),
    "an optimizer by keyword": before(
        SETS,
        "rule = torch.optim.SGD(model.parameters(), lr=0.1)",
        ("compute_metrics=compute_metrics,", "compute_metrics=compute_metrics, optimizers=(rule, None),"),
    ),
    "an optimizer put into the trainer": before(
        TRAINS, "trainer.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"
    ),
    "weights with noise": before(
        SETS, "for name, weight in model.named_parameters():\n    weight.data += 0.01 * torch.randn_like(weight)"
    ),
    "labels that a mapping merges": labelled(
        '[MERGED[star] for star in rows["stars"]]',
        ("def tokenize", "MERGED = {0: 0, 1: 0, 2: 1, 3: 1, 4: 1}\n\ndef tokenize"),
    ),
    "rows that are repeated": before(SETS, 'data["train"] = data["train"].repeat(3)'),
    "a callback of a name that is known": before(
        METRICS,
        CALLBACK.replace("NAME", "ProgressCallback"),
        (TRAINS, f"trainer.add_callback(ProgressCallback())\n{TRAINS}"),
    ),
    "TRL: rows in a list": changed(
        TUNED,
        ('train_dataset=dataset["train"]', 'train_dataset=[row for row in dataset["train"] if len(row["text"]) > 9]'),
    ),
    "TRL: a collator of its own": changed(
        TUNED, ('train_dataset=dataset["train"]', 'data_collator=lambda rows: rows, train_dataset=dataset["train"]')
    ),
    "tokens that are changed": changed(
        TRAINED,
        (TOKENS, f'{TOKENISED}    out["input_ids"] = [ids[1:] for ids in out["input_ids"]]\n    return out'),
    ),
}
QUIET: dict[str, str] = {
    "prints and evaluates": changed(
        TRAINED,
        (
            TRAINS,
            'print(len(data["train"]))\nlengths = [len(text) for text in data["train"]["review"]]\n'
            "print(np.percentile(lengths, 95))\nresult = trainer.train()\nmetrics = result.metrics\n"
            'trainer.log_metrics("train", metrics)\ntrainer.save_state()\nprint(trainer.evaluate())',
        ),
    ),
    "rows shuffled in place": before(SETS, 'data["train"] = data["train"].shuffle(seed=3)'),
    "a log of its own": subclass(
        "    def log(self, logs, *more):\n        print(logs)\n        super().log(logs, *more)"
    ),
    # held out
    "in a function": MAIN,
    "labels of a column": labelled('rows["stars"]'),
    "timing, saving, wandb": changed(
        TRAINED,
        (
            TRAINS,
            "import time, wandb\nbegun = time.time()\nwandb.watch(model)\ntrainer.train()\n"
            'print(f"took {time.time() - begun}")\nmodel.save_pretrained("x")\ntokenizer.save_pretrained("x")\n'
            'with open("log.txt", "w") as file:\n    file.write(str(trainer.state.log_history))',
        ),
    ),
    "TRL: prints": changed(TUNED, (TRAINS, f"print(dataset)\nmodel.print_trainable_parameters()\n{TRAINS}")),
}
