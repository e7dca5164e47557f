"""Metrics of classes without warnings, and of answers by the rules of SQuAD, worked out by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from comet_moe.experiments.bert.evaluate import (
    Answer,
    Window,
    answer_metrics,
    answer_scores,
    best_answer,
    class_metrics,
    normalize_answer,
    word_f1,
)

pairs = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=60)


@pytest.mark.filterwarnings("error")
@given(pairs)
def test_metrics_of_classes_are_those_of_their_definitions(rows):
    predicted, labels = np.array(rows).T
    metrics = class_metrics(("accuracy", "f1", "matthews"), predicted, labels)
    assert metrics["accuracy"] == np.mean(predicted == labels)
    hits, positives = np.sum(predicted & labels), np.sum(predicted) + np.sum(labels)
    assert metrics["f1"] == pytest.approx(2 * hits / positives if positives else 0)
    varied = np.std(predicted) > 0 and np.std(labels) > 0
    correlation = np.corrcoef(predicted, labels)[0, 1] if varied else 0
    # Two ways to sum the same products of small integers, in double precision.
    assert metrics["matthews"] == pytest.approx(correlation, abs=1e-9)


def test_metrics_are_returned_by_name_and_nan_without_rows():
    metrics = class_metrics(("f1", "accuracy"), np.array([1, 0, 1]), np.array([1, 1, 1]))
    assert metrics == {"f1": pytest.approx(0.8), "accuracy": pytest.approx(2 / 3)}
    assert np.isnan(class_metrics(("matthews",), np.array([], int), np.array([], int))["matthews"])


def test_answers_are_compared_without_articles_case_and_punctuation():
    assert normalize_answer("The  Cat's, a hat!") == "cats hat"
    assert word_f1("the red cat", "a cat") == pytest.approx(2 / 3)
    assert word_f1("", "") == 1
    assert word_f1("cat", "") == 0


def test_the_nearest_gold_answer_counts_and_none_means_no_answer():
    assert answer_scores("red cat", ["dog", "The red cat."]) == (1.0, 1.0)
    assert answer_scores("cat", ["red cat", "dog"]) == (pytest.approx(2 / 3), 0.0)
    assert answer_scores("", []) == (1.0, 1.0)
    assert answer_scores("cat", []) == (0.0, 0.0)


CONTEXT = "big red cat"
OFFSETS = np.array([[-1, -1], [-1, -1], [0, 3], [4, 7], [8, 11]])


def window(start, end):
    return Window(np.array(start, float), np.array(end, float), OFFSETS)


def test_the_best_span_ends_after_it_starts_and_lies_in_the_context():
    scored = window([1, 99, 0, 5, 4], [1, 99, 6, 2, 3])  # 99: tokens of the question
    assert best_answer(CONTEXT, [scored]) == Answer("red cat", (1 + 1) - (5 + 3))


def test_windows_compete_and_the_weakest_no_answer_counts():
    first, second = window([3, 0, 1, 0, 0], [3, 0, 1, 0, 0]), window([1, 0, 0, 0, 4], [1, 0, 0, 0, 5])
    assert best_answer(CONTEXT, [first, second]) == Answer("cat", (1 + 1) - (4 + 5))


def test_an_answer_has_at_most_30_tokens():
    tokens = 40
    offsets = np.stack([np.arange(tokens) * 2, np.arange(tokens) * 2 + 1], 1)
    start, end = np.zeros(tokens), np.zeros(tokens)
    start[1], end[39], end[5] = 9, 9, 1
    found = best_answer("x " * tokens, [Window(start, end, offsets)])
    assert found.text == "x x x x x"


def test_no_answer_is_given_above_the_threshold():
    answers = [Answer("cat", -1.0), Answer("dog", 2.0), Answer("bird", 0.5)]
    gold = [["cat"], [], ["bird"]]
    found = answer_metrics(answers, gold, threshold=0.0)
    assert (found["f1"], found["exact_match"]) == (pytest.approx(2 / 3), pytest.approx(2 / 3))
    assert answer_metrics(answers, gold, threshold=1.0)["exact_match"] == 1.0
    assert found["best_exact_match"] == 1.0
    assert found["best_exact_match_threshold"] == 0.5


@given(
    st.lists(
        st.tuples(
            st.integers(-3, 3), st.sampled_from(["cat", "dog"]), st.sampled_from(["cat", "", "cat dog"])
        ),
        min_size=1,
        max_size=12,
    )
)
def test_the_best_threshold_is_the_best_of_all_thresholds(rows):
    answers = [Answer(text, float(margin)) for margin, text, _ in rows]
    gold = [[truth] if truth else [] for _, _, truth in rows]
    found = answer_metrics(answers, gold)
    tried = [answer_metrics(answers, gold, threshold) for threshold in np.arange(-5, 5, 0.5)]
    for name in ("f1", "exact_match"):
        assert found[f"best_{name}"] == pytest.approx(max(metrics[name] for metrics in tried))
        again = answer_metrics(answers, gold, found[f"best_{name}_threshold"])
        assert again[name] == pytest.approx(found[f"best_{name}"])
