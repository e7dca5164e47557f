"""A BERT, dense or sparse, on the rows of a task: loss, metrics, routing, operations and parameters.

Answers are scored by the rules of SQuAD v2.0. An example is a question on a context. A context that is too
long for the model is split into windows that overlap, each with scores of its own. Shapes: T tokens of a
window.
"""

import re
import string
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from comet_moe.bert.modeling import CometBertLayer
from comet_moe.checks import without_value_checks
from comet_moe.devices import Placement
from comet_moe.experiments.bert.tokens import Features, Index, TaskData, evaluation_batches
from comet_moe.experiments.training.evaluate import routing_record
from comet_moe.experiments.training.records import EvaluationRecord
from comet_moe.routing import Routing
from comet_moe.statistics import RoutingStatistics

Array = npt.NDArray[Any]


def class_metrics(names: tuple[str, ...], predicted: Array, labels: Array) -> dict[str, float]:
    """The metrics of scikit-learn called ``names`` of (N,) classes; "f1" and "matthews" are of two classes.

    F1 is that of class 1. It and Matthews' correlation are 0 where they are undefined.
    """
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    if not len(labels):
        return dict.fromkeys(names, float("nan"))
    values = {
        "accuracy": lambda: accuracy_score(labels, predicted),
        "f1": lambda: f1_score(labels, predicted, zero_division=0),
        # scikit-learn warns where there is a single class.
        "matthews": lambda: (
            matthews_corrcoef(labels, predicted) if len(np.union1d(labels, predicted)) > 1 else 0.0
        ),
    }
    return {name: float(values[name]()) for name in names}


NUM_CANDIDATES = 20
"""Starts and ends of a window that are combined: those with the highest scores."""

MAX_ANSWER_TOKENS = 30

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Window(NamedTuple):
    """The scores of one window.

    Attributes:
        start, end: (T,) scores; those of token 0 are for "no answer".
        offsets: (T, 2) first character of each token in the context and the one after its last; -1 for tokens
            that are not of the context.
    """

    start: Array
    end: Array
    offsets: Array


class Answer(NamedTuple):
    """The best answer of an example, and how much better "no answer" scores."""

    text: str
    null_margin: float


def best_answer(context: str, windows: Sequence[Window]) -> Answer:
    """The span of ``context`` with the highest start + end score in any window.

    ``null_margin`` is the lowest score of "no answer" over the windows minus that of the best span.
    """
    null = min(float(window.start[0] + window.end[0]) for window in windows)
    best, text = -np.inf, ""
    for window in windows:
        score, first, last = _best_span(window)
        if score > best:
            best, text = score, context[window.offsets[first, 0] : window.offsets[last, 1]]
    return Answer(text, null - best)


def _best_span(window: Window) -> tuple[float, int, int]:
    """Score, first and last token; -inf where no token is of the context."""
    in_context = np.flatnonzero(window.offsets[:, 0] >= 0)
    starts = in_context[np.argsort(-window.start[in_context], kind="stable")[:NUM_CANDIDATES]]
    ends = in_context[np.argsort(-window.end[in_context], kind="stable")[:NUM_CANDIDATES]]
    length = ends[None, :] - starts[:, None] + 1
    scores = window.start[starts][:, None] + window.end[ends][None, :]
    scores = np.where((length >= 1) & (length <= MAX_ANSWER_TOKENS), scores, -np.inf)
    if not np.isfinite(scores).any():
        return -np.inf, 0, 0
    row, column = np.unravel_index(int(scores.argmax()), scores.shape)
    return float(scores[row, column]), int(starts[row]), int(ends[column])


def answer_metrics(
    answers: Sequence[Answer], gold: Sequence[Sequence[str]], threshold: float = 0.0
) -> dict[str, float]:
    """F1 and exact match, where the prediction is "no answer" if ``null_margin`` is above ``threshold``.

    ``best_f1`` and ``best_exact_match`` are those of the threshold that is best for each, which is returned
    too. For an example without gold answers, "no answer" is correct.
    """
    given = np.array(
        [answer_scores(answer.text, truths) for answer, truths in zip(answers, gold, strict=True)]
    )
    none = np.array([answer_scores("", truths) for truths in gold])
    margins = np.array([answer.null_margin for answer in answers])
    chosen = np.where((margins > threshold)[:, None], none, given).mean(0)
    (best_f1, f1_at), (best_exact, exact_at) = (
        _best_threshold(given[:, metric], none[:, metric], margins) for metric in (0, 1)
    )
    return {
        "f1": float(chosen[0]),
        "exact_match": float(chosen[1]),
        "best_f1": best_f1,
        "best_f1_threshold": f1_at,
        "best_exact_match": best_exact,
        "best_exact_match_threshold": exact_at,
    }


def _best_threshold(given: Array, none: Array, margins: Array) -> tuple[float, float]:
    """The highest mean over all thresholds on ``margins``, and the lowest threshold that gives it.

    As the threshold falls, answers turn into "no answer" in the order of their margins.
    """
    order = np.argsort(margins, kind="stable")
    gain = np.concatenate(([0.0], np.cumsum((given - none)[order])))
    # A threshold cannot separate equal margins.
    ordered = margins[order]
    allowed = np.concatenate(([True], ordered[1:] != ordered[:-1], [True]))
    best = int(np.where(allowed, gain, -np.inf).argmax())
    threshold = ordered[best - 1] if best else ordered[0] - 1.0
    return float((none.sum() + gain[best]) / len(margins)), float(threshold)


def answer_scores(answer: str, truths: Sequence[str]) -> tuple[float, float]:
    """(F1 over words, exact match), the highest over ``truths``; without any, "" is correct."""
    truths = [truth for truth in truths if normalize_answer(truth)] or [""]
    return max(word_f1(answer, truth) for truth in truths), max(
        float(normalize_answer(answer) == normalize_answer(truth)) for truth in truths
    )


def word_f1(answer: str, truth: str) -> float:
    """2PR / (P + R) over normalised words; where one side has no words, 1 if both have none, else 0."""
    words, true_words = normalize_answer(answer).split(), normalize_answer(truth).split()
    if not words or not true_words:
        return float(words == true_words)
    common = sum((Counter(words) & Counter(true_words)).values())
    return 2 * common / (len(words) + len(true_words))


def normalize_answer(text: str) -> str:
    """Lower case, without punctuation, articles and extra spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


T = TypeVar("T")

EVALUATION_BATCH = 32
"""Rows of a batch; not the training batch size, so that metrics do not depend on it."""


@torch.no_grad()
@without_value_checks()  # NaN weights give a NaN loss, which ends the run with a reason, not with an error
def evaluate(model: Any, data: TaskData, split: str, placement: Placement) -> EvaluationRecord:
    """Evaluate ``model`` in eval mode on all rows of ``split``; its mode is restored afterwards.

    Experts per sample are a mean over tokens and layers, and 1 for a dense model. Operations are all that
    ran, divided by the tokens that are not padding, or by the rows.
    """
    task, features = data.task, data.splits[split]
    was_training = model.training
    model.eval()
    is_sparse = model.config.model_type == "comet_bert"
    statistics: list[RoutingStatistics] = []
    outputs: list[tuple[Index, Any]] = []
    flops = tokens = 0
    loss = seconds = 0.0
    for rows in evaluation_batches(features, EVALUATION_BATCH):
        batch, routings = features.batch(rows), list[Routing]()
        started = time.perf_counter()
        with placement.autocast():
            output = model(**placement.move(batch), **({"routings": routings} if is_sparse else {}))
        seconds += time.perf_counter() - started
        outputs.append((rows, output))
        loss += len(rows) * float(output.loss) / len(features)
        tokens += int(batch["attention_mask"].sum())
        flops += batch_flops(model, len(rows), batch["input_ids"].shape[1], routings)
        statistics = statistics or [RoutingStatistics() for _ in routings]
        for sums, routing in zip(statistics, routings, strict=True):
            sums.add(routing)
    model.train(was_training)
    metrics = (
        class_metrics(task.metrics, find_classes(features, outputs), features.targets["labels"])
        if task.classes
        else answer_metrics(
            find_answers(features, outputs), features.table["answer_texts"], data.null_threshold
        )
    )
    routing_by_layer = by_layer(map(routing_record, statistics))
    experts = [record.experts_per_sample for record in routing_by_layer.values()]
    return EvaluationRecord(
        loss=100 * loss,
        tasks={task.name: {"loss": loss, **metrics}},
        experts_per_sample=float(np.mean(experts)) if experts else 1.0,
        flops_per_sample=flops / max(len(features), 1),
        flops_per_token=flops / max(tokens, 1),
        tokens_per_second=tokens / max(seconds, 1e-9),
        parameters_effective=effective_parameters(model, experts),
        routing=routing_by_layer,
    )


def by_layer(values: Iterable[T]) -> dict[str, T]:
    """``values`` of the layers in their order, under "layer 1", "layer 2", ..."""
    return {f"layer {number}": value for number, value in enumerate(values, 1)}


def find_classes(features: Features, outputs: list[tuple[Index, Any]]) -> Index:
    """The class of each row with the highest logit."""
    predicted = np.empty(len(features), np.int64)
    for rows, output in outputs:
        predicted[rows] = output.logits.argmax(-1).numpy(force=True)
    return predicted


def find_answers(features: Features, outputs: list[tuple[Index, Any]]) -> list[Answer]:
    """The best answer to each question, over the windows on its context."""
    windows: list[list[Window]] = [[] for _ in range(len(features.table))]
    for rows, output in outputs:
        starts, ends = (logits.cpu().double().numpy() for logits in (output.start_logits, output.end_logits))
        for row, start, end in zip(rows, starts, ends, strict=True):
            offsets = features.offsets[row]
            window = Window(start[: len(offsets)], end[: len(offsets)], offsets)
            windows[features.example[row]].append(window)
    return [best_answer(*example) for example in zip(features.table["context"], windows, strict=True)]


def batch_flops(model: Any, rows: int, length: int, routings: Sequence[Routing]) -> int:
    """Floating-point operations of the matrix products for ``rows`` x ``length`` tokens, as they ran.

    Padding counts where it runs: in attention, in gates and in dense feed-forward layers. ``routings`` are
    those of the layers of a sparse model for this batch.
    """
    p, tokens = model.config.hidden_size, rows * length
    layers = model.base_model.encoder.layer
    total = len(layers) * tokens * (8 * p * p + 4 * length * p)
    if routings:
        total += sum(layer.moe.flops([routing]) for layer, routing in zip(layers, routings, strict=True))
    else:
        total += len(layers) * tokens * 4 * p * model.config.intermediate_size
    if hasattr(model, "qa_outputs"):
        return int(total + 2 * tokens * p * model.qa_outputs.out_features)
    return int(total + 2 * rows * p * (p + model.classifier.out_features))


def stored_parameters(model: nn.Module) -> int:
    """Number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def effective_parameters(model: nn.Module, experts_per_token: Sequence[float]) -> float:
    """Parameters that a token uses on average, with its mean number of selected experts in each layer."""
    mixtures = [module.moe for module in model.modules() if isinstance(module, CometBertLayer)]
    return stored_parameters(model) - sum(
        stored_parameters(moe.experts) * (1 - selected / moe.experts.num_experts)
        for moe, selected in zip(mixtures, experts_per_token, strict=True)
    )
