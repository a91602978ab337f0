"""The metrics of a batch in evaluation mode, by their usual libraries.

In: a job, a model, examples. Out: metric -> value, named as in evaluations; fewer if a library is missing.
"""

import copy
import math
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import nn

from lockstep.plain.examples import IGNORED, end_token
from lockstep.plain.losses import batch_loss, inputs_of, pad, vectors_of

TRAINING = {"label_smoothing": 0.0, "class_weights": None}  # options that evaluations ignore, except for preferences
LONGEST = 16  # maximum number of tokens to generate


@torch.no_grad()
def scores(job: Any, model: nn.Module, examples: list[dict], writes: bool = True) -> dict[str, float]:
    """Return the mean loss, without class weights, smoothing or focal factor, and the task's metrics.

    The loss of preferences keeps its smoothing, as in TRL. `job`: a `Plain`. `writes`: include metrics of generated
    text."""
    plain, task, outputs = copy.copy(job), job.run["task"], []
    left_out = {"loss": None} if task.get("loss") == "focal" else {}
    if task["name"] != "preference":
        left_out |= {key: TRAINING[key] for key in TRAINING.keys() & task.keys()}
    plain.run = {**job.run, "task": task | left_out}
    plain.class_weights = None
    hook = model.eval().register_forward_hook(lambda module, inputs, output: outputs.append(output))
    total, count = batch_loss(plain, model, examples)
    hook.remove()
    numbers = {"loss": float(total) / count}
    for score in SCORES.get(task["name"], ())[: None if writes else 1]:
        with suppress(ImportError):
            numbers |= score(plain, model, examples, outputs[0])
    if "accuracy" in numbers and "next" in examples[0] and task["name"] != "token_classification":
        numbers["perplexity"] = math.exp(min(numbers["loss"], 700.0))
    return numbers


def _labels(job: Any, model: nn.Module, examples: list[dict], output: Any) -> dict[str, float]:
    from scipy import stats
    from sklearn import metrics

    task, true = job.run["task"], np.array([example["labels"] for example in examples])
    logits = output.logits.double().cpu()
    if task.get("regression"):
        pairs = list(zip(true.T, logits.numpy().T, strict=True))
        numbers = {name: np.mean([of(*pair)[0] for pair in pairs]) for name, of in
                 (("pearson", stats.pearsonr), ("spearman", stats.spearmanr))}  # fmt: skip
        errors = {"mse": metrics.mean_squared_error, "mae": metrics.mean_absolute_error, "r2": metrics.r2_score}
        return numbers | {name: of(true, logits) for name, of in errors.items()}
    if task.get("multi_label"):
        some = true.any(0)
        return {"average_precision": metrics.average_precision_score(true[:, some], logits[:, some].sigmoid())}
    if task["threshold"] is not None:
        return {}
    likeliest = logits.argmax(-1).numpy()
    right = {"accuracy": metrics.accuracy_score(true, likeliest)}
    return right | {"macro_f1": metrics.f1_score(true, likeliest, average="macro")}


def _accuracy(job: Any, model: nn.Module, examples: list[dict], output: Any) -> dict[str, float]:
    labels = pad(examples, "next", IGNORED, output.logits.device)
    right = (output.logits.argmax(-1) == labels)[labels != IGNORED]
    return {"accuracy": float(right.double().mean())}


def _entities(job: Any, model: nn.Module, examples: list[dict], output: Any) -> dict[str, float]:
    from seqeval import metrics

    rows = zip(output.logits.argmax(-1).tolist(), examples, strict=True)
    tags = [[(job.labels[a], job.labels[b]) for a, b in zip(p, e["next"], strict=False) if b >= 0] for p, e in rows]
    predicted, true = ([[pair[side] for pair in row] for row in tags] for side in (0, 1))
    of = {"precision": metrics.precision_score, "recall": metrics.recall_score, "f1": metrics.f1_score}
    return {name: float(score(true, predicted, zero_division=0)) for name, score in of.items()}


def _written(job: Any, model: Any, examples: list[dict], output: Any) -> dict[str, float]:
    """Generate texts and compare them with the references: corpus BLEU and chrF, or mean ROUGE for summaries."""
    task, pad_id = job.run["task"], job.target_tokenizer.pad_token_id
    max_new_tokens = min(LONGEST, task["target_length"] or job.run["data"]["max_length"])
    how = {
        "max_new_tokens": max_new_tokens,
        "num_beams": task["beams"],
        "pad_token_id": pad_id,
        "forced_eos_token_id": None,
    }
    how |= {
        "eos_token_id": end_token(job.target_tokenizer),
        "decoder_start_token_id": model.config.decoder_start_token_id,
    }
    tokens = model.generate(**inputs_of(job, examples, output.logits.device), **how)
    texts = [text.strip() for text in job.target_tokenizer.batch_decode(tokens, skip_special_tokens=True)]
    references = [example["reference"] for example in examples]
    if task["name"] == "summarization":
        from rouge_score.rouge_scorer import RougeScorer

        kinds = ("rouge1", "rouge2", "rougeL")
        each = [RougeScorer(kinds).score(reference, text) for reference, text in zip(references, texts, strict=True)]
        return {kind: 100 * float(np.mean([score[kind].fmeasure for score in each])) for kind in kinds}
    import sacrebleu

    scorers = {"bleu": sacrebleu.BLEU(tokenize=task["bleu_tokenizer"], force=True), "chrf": sacrebleu.CHRF()}
    return {name: scorer.corpus_score(texts, [references]).score for name, scorer in scorers.items()}


def _answers(job: Any, model: nn.Module, examples: list[dict], output: Any) -> dict[str, float]:
    """Return SQuAD scores of each question's span with the highest logit sum in any window."""
    from torchmetrics.functional.text import squad

    task, rows = job.run["task"], iter(zip(output.start_logits.tolist(), output.end_logits.tolist(), strict=True))
    predicted, true = list[Any](), list[Any]()
    for number, example in enumerate(examples):
        spans, none = list[tuple[float, str]](), math.inf
        for window in example["windows"]:
            starts, ends = next(rows)
            none = min(none, starts[0] + ends[0])
            inside = window["spans"].items()
            spans += [
                (starts[i] + ends[j], example["context"][first[0] : last[1]])
                for i, first in inside
                for j, last in inside
                if i <= j < i + task["answer_tokens"]
            ]
        best, text = max(spans, key=lambda span: span[0])
        text = "" if task["unanswerable"] and none > best else text
        predicted.append({"id": str(number), "prediction_text": text})
        true.append({"id": str(number), "answers": {"text": example["right"] or [""], "answer_start": []}})
    return {name: float(score) for name, score in squad(predicted, true).items()}


def _cosines(job: Any, model: nn.Module, examples: list[dict], output: Any) -> dict[str, float]:
    sides = vectors_of(job, model, examples, next(model.parameters()).device)  # [sides, B, H]
    cosines = (sides[:1] * sides[1:]).sum(-1).double().cpu()
    if job.run["task"]["score"]:
        from scipy import stats

        scored = [example["score"] for example in examples]
        return {name: float(of(cosines[0], scored)[0]) for name, of in
                (("pearson", stats.pearsonr), ("spearman", stats.spearmanr))}  # fmt: skip
    return {"triplet_accuracy": float((cosines[:1] > cosines[1:]).double().mean())} if len(cosines) > 1 else {}


def _rewards(job: Any, model: nn.Module, examples: list[dict], output: Any) -> dict[str, float]:
    rewards = output.logits.double().view(-1, 2)
    margin = rewards[:, 0] - rewards[:, 1]
    means = {"accuracy": (margin > 0).double(), "margin": margin, "reward": rewards}
    return {name: float(each.mean()) for name, each in means.items()}


SCORES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("classification", "image_classification"), (_labels,)),
    **dict.fromkeys(("language_modeling", "masked_language_modeling"), (_accuracy,)),
    **dict.fromkeys(("translation", "summarization"), (_accuracy, _written)),
    "token_classification": (_accuracy, _entities),
    "question_answering": (_answers,),
    "embedding": (_cosines,),
    "reward": (_rewards,),
}
