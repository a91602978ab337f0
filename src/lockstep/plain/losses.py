"""The loss of a padded batch through a transformers model, in its textbook form.

In: a model, examples. Out: the sum of the losses over targets, and the number of targets.

With `job.libraries`, the library that defines a loss computes it: sentence-transformers (6.0.0 to 6.2.0) for
embeddings, from vectors; TRL (1.16.0) for preferences, from token log-probabilities, and for rewards. TRL's losses are
methods of trainers, which are built here without a model: `DPOTrainer.compute_loss`, `RewardTrainer.compute_loss`, and
`trl.experimental.cpo.CPOTrainer.cpo_loss` for SimPO. Two of them differ in form from the run file. TRL's `sigmoid`
(here `dpo`) has no label smoothing; its `aot` has, but sorts the pairs of a batch, so each pair is passed as its own
batch, where both losses are equal. Its `simpo` subtracts gamma / beta before multiplying by beta: equal within
rounding.
"""

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, logsigmoid, normalize

from lockstep.plain import module
from lockstep.plain.examples import IGNORED
from lockstep.plain.rows import NotCovered

Loss = tuple[Tensor, float]
# given only labels, these families ignore the config's start token or shift the source
OWN_START = ("mbart", "plbart", "t5gemma", "t5gemma2", "fsmt")
SMALL = 1e-4  # relative: a model's addition to its loss above this is not rounding


def batch_loss(job: Any, model: nn.Module, examples: list[dict]) -> Loss:
    """Return the loss summed over targets (float32, with graph) and their weighted number. `job`: a `Plain`."""
    return LOSSES[job.run["task"]["name"]](job, model, examples, next(model.parameters()).device)


def pad(examples: list[dict], name: str, fill: int, device: Any, side: str = "right") -> Tensor:
    """Stack the list `name` of every example, padded on one side: int64 [B, T]."""
    rows = [torch.tensor(example[name]) for example in examples]
    return nn.utils.rnn.pad_sequence(rows, True, fill, side).to(device)


def inputs_of(job: Any, examples: list[dict], device: Any) -> dict[str, Tensor]:
    """Return a model's inputs: images, or padded tokens with an attention mask, or with position ids that restart at
    each text."""
    if "pixel_values" in examples[0]:
        return {"pixel_values": torch.stack([example["pixel_values"] for example in examples]).to(device)}
    examples = [{"attention_mask": [1] * len(example["input_ids"])} | example for example in examples]
    mask = "position_ids" if "position_ids" in examples[0] else "attention_mask"
    fills = {"input_ids": job.tokenizer.pad_token_id, "token_type_ids": 0, mask: 0}
    side = "left" if job.reads_last else "right"
    return {name: pad(examples, name, fill, device, side) for name, fill in fills.items() if name in examples[0]}


def _classification(job: Any, model: nn.Module, examples: list[dict], device: Any) -> Loss:
    """Return the task's loss plus any term that the model adds to its own loss, such as a router loss."""
    task, labels = job.run["task"], torch.tensor([example["labels"] for example in examples], device=device)
    output = _with_labels(model, inputs_of(job, examples, device), labels)
    logits, count = output.logits.float(), float(labels.numel())  # [B, C]
    weight = None if job.class_weights is None else torch.tensor(job.class_weights, device=device).float()
    smooth, focal = task["label_smoothing"], task["focal_gamma"] if task["loss"] == "focal" else 0.0
    if task.get("regression"):
        plain = (logits - labels).square()
        losses = (logits - labels).abs() if task["loss"] == "mae" else plain
    elif task.get("multi_label"):
        plain, soft = (
            binary_cross_entropy_with_logits(logits, labels, reduction="none"),
            labels * (1 - smooth) + smooth / 2,
        )
        losses = binary_cross_entropy_with_logits(logits, soft, pos_weight=weight, reduction="none")
        losses = losses * (1 - torch.where(labels > 0, logits.sigmoid(), (-logits).sigmoid())) ** focal
    else:
        plain = cross_entropy(logits, labels, reduction="none")
        losses = cross_entropy(logits, labels, weight, reduction="none", label_smoothing=smooth)
        losses = losses * (1 - logits.softmax(-1).gather(1, labels[:, None])[:, 0]) ** focal
        count = count if weight is None else float(weight.double()[labels].sum())
    return losses.sum() + count * _added(output.loss, [(plain.sum(), labels.numel())]), count


def _tokens(job: Any, model: nn.Module, examples: list[dict], device: Any) -> Loss:
    """Return the cross entropy over the tokens of a text or target, plus any term that the model adds to its own loss.

    A sequence-to-sequence model shifts its decoder inputs; the start token is not padding, even if it has the same
    id."""
    task, inputs, config = job.run["task"], inputs_of(job, examples, device), getattr(model, "config")  # noqa: B009
    targets, causal = pad(examples, "next", IGNORED, device), task["name"] == "language_modeling"
    # a causal model shifts labels itself
    labels = torch.cat([torch.full_like(targets[:, :1], IGNORED), targets[:, :-1]], 1) if causal else targets
    if "target" in task:
        inputs["decoder_attention_mask"] = (targets != IGNORED).long()
        if config.model_type in OWN_START:
            shifted = targets.roll(1, 1).masked_fill(targets.roll(1, 1) == IGNORED, config.pad_token_id)
            shifted[:, 0] = config.decoder_start_token_id
            inputs["decoder_input_ids"] = shifted
    output = _with_labels(model, inputs, labels)
    total, count = _summed(output.logits, targets, task.get("label_smoothing", 0.0))
    means = [_summed(output.logits, labels)] + [_summed(output.logits[:, :-1], labels[:, 1:])] * causal
    return total + count * _added(output.loss, means), count


def _with_labels(model: nn.Module, inputs: dict[str, Tensor], labels: Tensor) -> Any:
    """Call the model with labels: logits and the model's own loss. Errors: `NotCovered` if transformers fails."""
    try:
        return model(**inputs, labels=labels)
    except ValueError as error:  # the model family expects another shape
        raise NotCovered(f"model: the loss that transformers has for {type(model).__name__} fails: {error}") from error


def _added(loss: Tensor, means: list[Loss]) -> Tensor | float:
    """Return the term that a model adds to its mean cross entropy, such as a router loss; 0 if within rounding.

    `means`: sums and counts of the possible cross entropies, the usual one last; some decoders do not shift labels."""
    candidates = [total / count for total, count in means if count]
    close = [abs(float(loss.detach() - mean.detach())) <= SMALL * abs(float(loss.detach())) for mean in candidates]
    return 0.0 if any(close) or not candidates else loss - candidates[-1]


def _summed(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Loss:
    """Return the cross entropy of [B, T, V] against [B, T], summed over targets that are not IGNORED."""
    flat = logits.float().flatten(0, 1)
    total = cross_entropy(flat, targets.flatten(), ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing)
    return total, int((targets != IGNORED).sum())


def _questions(job: Any, model: nn.Module, examples: list[dict], device: Any) -> Loss:
    """Return the cross entropies of the answer's first and last token over all tokens other than padding."""
    windows = [window for example in examples for window in example["windows"]]
    inputs = inputs_of(job, windows, device)
    output = model(**inputs)
    both = (output.start_logits, output.end_logits) if "start_logits" in output else output.logits.unbind(-1)
    hidden, least = inputs["attention_mask"] == 0, torch.finfo(torch.float32).min
    ends = torch.tensor([window["ends"] for window in windows], device=device).T
    starts, stops = (side.float().masked_fill(hidden, least) for side in both)
    losses = cross_entropy(starts, ends[0], reduction="sum") + cross_entropy(stops, ends[1], reduction="sum")
    return losses, 2 * len(windows)


def vectors_of(job: Any, model: nn.Module, examples: list[dict], device: Any) -> Tensor:
    """Return one vector per text: float32 [texts of an example, B, H]."""
    sides = len(examples[0]["texts"])
    inputs = inputs_of(job, [e["texts"][side] for side in range(sides) for e in examples], device)
    output = model(**inputs)
    vectors = output.logits if "logits" in output else pooled(output.last_hidden_state, inputs, job.run["task"])
    return vectors.float().view(sides, len(examples), -1)


def pooled(hidden: Tensor, inputs: dict[str, Tensor], task: dict) -> Tensor:
    """Pool hidden states (first token, last token or mean) into unit vectors: float32 [B, H]."""
    hidden, mask = hidden.float(), inputs["attention_mask"][:, :, None].float()
    ways = {
        "cls": hidden[:, 0],
        "last_token": hidden[torch.arange(len(hidden)), inputs["attention_mask"].sum(1) - 1],
        "mean": (hidden * mask).sum(1) / mask.sum(1),
    }
    return normalize(ways[task["pooling"]], dim=-1)


def _embedding(job: Any, model: Any, examples: list[dict], device: Any) -> Loss:
    """Return the cross entropy of each anchor's positive among the batch's texts, or the squared error of the cosines.

    Neither the anchor's own text nor its other positives are negatives."""
    task, count, sides = job.run["task"], len(examples), len(examples[0]["texts"])
    vectors = vectors_of(job, model, examples, device)
    if job.libraries:
        from sentence_transformers.sentence_transformer import losses
    if task["score"]:
        true_scores = torch.tensor([example["score"] for example in examples], device=device).float()
        if job.libraries:
            return losses.CosineSimilarityLoss(model).compute_loss_from_embeddings(
                [*vectors], true_scores
            ) * count, count
        return ((vectors[0] * vectors[1]).sum(1) - true_scores).square().sum(), count
    anchor_names, candidate_names = (
        [e["names"][side] for side in some for e in examples] for some in ((0,), range(1, sides))
    )
    most = task["negatives"] or count  # number of other rows used as negatives
    excluded = [
        [
            at != row
            and (
                name in (anchor_names[row], candidate_names[row])
                or anchor_names[at:][:1] == [anchor_names[row]]
                or (at - row) % count > most
            )
            for at, name in enumerate(candidate_names)
        ]
        for row in range(count)
    ]
    scale, mask = task["similarity_scale"], torch.tensor(excluded, device=device)
    targets = torch.arange(count).to(device)
    if job.libraries:
        return losses.MultipleNegativesRankingLoss(
            model, scale, lambda a, b: (a @ b.T).masked_fill(mask, -torch.inf)
        ).compute_loss_from_embeddings([*vectors], targets) * count, count
    scores = (scale * vectors[0] @ vectors[1:].flatten(0, 1).T).masked_fill(mask, -torch.inf)
    return cross_entropy(scores, targets, reduction="sum"), count


def _preference(job: Any, model: nn.Module, examples: list[dict], device: Any) -> Loss:
    """Return the loss of DPO (arXiv:2305.18290), IPO (2310.12036), SLiC's hinge (2305.10425) or SimPO (2405.14734)."""
    task, pairs = job.run["task"], [answer for example in examples for answer in example["answers"]]
    inputs, targets = inputs_of(job, pairs, device), pad(pairs, "next", IGNORED, device)

    def log_probabilities(by: nn.Module) -> Tensor:
        """Return the log-probability of each answer token, 0 elsewhere: [2B, T]."""
        return -cross_entropy(by(**inputs).logits.float().transpose(1, 2), targets, reduction="none")

    log_probs, is_target = log_probabilities(model), targets != IGNORED
    reference_log_probs = torch.zeros(targets.shape).to(device)
    if task["loss"] != "simpo":
        if job.reference is None:
            raise NotCovered("task.loss: a reference model is needed, and none was given")
        with torch.no_grad():
            reference_log_probs = log_probabilities(job.reference)
    if job.libraries:
        each_pair = zip(log_probs.split(2), reference_log_probs.split(2), is_target.split(2), strict=True)
        return torch.stack([_pair_by_trl(task, *pair) for pair in each_pair]).sum(), len(examples)
    lengths = is_target.sum(1) if task["loss"] in ("ipo", "simpo") else 1
    answers = ((log_probs - reference_log_probs).sum(1) / lengths).view(-1, 2)
    margin, smooth = answers[:, 0] - answers[:, 1], task["label_smoothing"]
    scaled = task["beta"] * margin
    losses = {
        "dpo": -(1 - smooth) * logsigmoid(scaled) - smooth * logsigmoid(-scaled),
        "ipo": (margin - 1 / (2 * task["beta"])).square(),
        "hinge": (1 - scaled).relu(),
        "simpo": -logsigmoid(scaled - task.get("gamma", 0.0)),
    }
    return losses[task["loss"]].sum(), len(examples)


def _pair_by_trl(task: dict, log_probs: Tensor, reference_log_probs: Tensor, is_target: Tensor) -> Tensor:
    """Return the loss of one pair by `DPOTrainer` or `CPOTrainer`. `log_probs`, `reference_log_probs`: of the tokens,
    by the model and its reference, 0 where not `is_target`: [2, T]."""
    import trl.experimental.cpo

    kind = {"dpo": "aot" if task["label_smoothing"] else "sigmoid"}.get(task["loss"], task["loss"])
    trainer = _trainer(
        trl.experimental.cpo.CPOTrainer if kind == "simpo" else trl.DPOTrainer,
        log_probs.device,
        beta=task["beta"],
        label_smoothing=task["label_smoothing"],
        loss_type=kind,
        loss_types=[kind],
        loss_weights=[1.0],
        simpo_gamma=task["gamma"],
    )
    if kind == "simpo":
        return trainer.cpo_loss(*(log_probs.sum(1) / is_target.sum(1)))[0]
    mask, reference = nn.functional.pad(is_target.long(), (1, 0)), reference_log_probs.sum(1)
    return trainer.compute_loss(
        lambda **_: SimpleNamespace(log_probs=log_probs, entropy=log_probs, mean_logits=log_probs, is_top1=is_target),
        {
            "input_ids": mask,
            "completion_mask": mask,
            "ref_chosen_logps": reference[:1],
            "ref_rejected_logps": reference[1:],
        },
    )


def _trainer(kind: Any, device: Any, **options: Any) -> Any:
    """Build a TRL trainer with only the attributes that its loss reads: options, and evaluation in one process."""
    trainer = kind.__new__(kind)
    vars(trainer).update(
        options,
        model=SimpleNamespace(training=False),
        accelerator=SimpleNamespace(device=device, gather=Tensor.detach, gather_for_metrics=Tensor.detach),
        alpha=0.0,  # weight of CPO's term; 0 in SimPO
        aux_loss_enabled=False,
        f_divergence_type="reverse_kl",
        ld_alpha=None,
        precompute_ref_logps=True,
        use_weighting=False,
        _metrics={"eval": defaultdict(list)},
        _total_train_tokens=0,
    )
    return trainer


def _reward(job: Any, model: nn.Module, examples: list[dict], device: Any) -> Loss:
    """Return the loss of the Bradley-Terry model (arXiv:2203.02155)."""
    task, answers = job.run["task"], [answer for example in examples for answer in example["answers"]]
    rewards = model(**inputs_of(job, answers, device)).logits.float().view(-1, 2)
    if job.libraries:
        from trl import RewardTrainer

        trainer = _trainer(RewardTrainer, device, args=SimpleNamespace(center_rewards_coefficient=task["center"]))
        # TRL expects all chosen answers before the rejected ones
        return trainer.compute_loss(lambda **_: SimpleNamespace(logits=rewards.T.reshape(-1, 1)), {}) * len(
            examples
        ), len(examples)
    losses = -logsigmoid(rewards[:, 0] - rewards[:, 1]) + task["center"] * rewards.sum(1).square()
    return losses.sum(), len(examples)


LOSSES: dict[str, Callable[..., Loss]] = {
    **dict.fromkeys(("classification", "image_classification"), _classification),
    **dict.fromkeys(("language_modeling", "masked_language_modeling", "token_classification"), _tokens),
    **dict.fromkeys(("translation", "summarization"), _tokens),
    "question_answering": _questions,
    "embedding": _embedding,
    "preference": _preference,
    "reward": _reward,
    "module": module.batch_loss,
}
