"""One target: a classifier and a regressor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils import check_array, column_or_1d
from sklearn.utils.multiclass import check_classification_targets

from comet_moe.experiments.data.table.schema import Target, TargetKind
from comet_moe.sklearn.base import BaseMoE
from comet_moe.sklearn.inputs import Column, refuse_times


@dataclass(eq=False, repr=False)
class MoEClassifier(ClassifierMixin, BaseMoE):
    """A classifier: a sparse mixture of experts over a table's columns.

    X is an array or a DataFrame. If all columns are numbers, all are numeric features. Otherwise columns may
    be numbers, texts, categories, dates and lists, and their kinds are inferred as for the ``table`` recipe.
    There a column with few distinct integers is categorical. NaN is a missing value.

    Args:
        gate: name of the gate, "comet", "topk", "softmax" and others; with local search if it ends in "+".
            "dense" is a network without a mixture that costs as much as ``k`` experts. "dense-per-task" has
            one expert per task.
        experts: number of experts.
        k: experts per sample; settings that a gate does not have are not used.
        units: widths of the layers of each expert.
        head: widths of the hidden layers between experts and output.
        embedding: width of the embedding of a category.
        numeric: "piecewise" for numbers by the bins that they pass, "scaled" for robust scaling.
        numeric_embedding: width of the embedding of a number, if "piecewise".
        dropout: probability of a zero in training, on the outputs of each layer of an expert.
        input_dropout: the same, on the input of the mixture.
        gamma, entropy: width of the smooth step and weight of the entropy loss of COMET and DSelect-k.
        load_balance: weight of the load-balancing loss; None means 0, and 0.01 for "switch".
        information: weight of the information between sample and expert, which replaces ``entropy``. None is
            that of the ``table`` recipe: 0.1 for "comet", 0.01 for "dselect" and 0 for others.
        warmup_epochs: epochs in which the gate turns from equal weights to its own.
        gate_settings: further settings of the gate by name, such as ``{"noise": True}`` of Top-k.
        search_epochs: epochs in which the permutation of a gate with "+" is learned.
        epochs: largest number of epochs.
        batch_size: rows per optimiser step; "auto" makes about 32 steps per epoch, of 32 to 1024 rows.
        learning_rate: of Adam, constant; that of gates is 5 times as large.
        validation_fraction: share of the rows that is not trained on, for early stopping; 0 trains on all
            rows and all epochs.
        patience: epochs without a lower validation loss after which training stops.
        columns: kinds of columns by name, "categorical", "numeric", "date" or "list", where what is inferred
            is not right; the columns of an array are x0, x1, ...
        key: name of the categorical column that a "hash" gate routes by.
        n_threads: threads of torch in ``fit`` and ``predict``; None leaves their number as it is.
        device: where ``fit`` trains: "auto" (an accelerator if there is one), "cpu", "cuda" or "mps". The
            fitted model is on the CPU, and predicts there.
        precision: of the products of experts and heads in ``fit``: "float32", "bfloat16", or "float16" on
            CUDA.
        random_state: seed of validation rows, weights, order of the rows and dropout. The same seed and
            number of threads give the same model.

    Attributes:
        classes_: the classes, in order.
        n_features_in_: number of columns of X.
        feature_names_in_: names of the columns of X, if all are strings.
        n_iter_: epochs trained.
        history_: one dictionary per epoch: ``train_loss`` and ``train_aux_loss`` as means over its steps,
            ``validation_loss``, metrics of each task on the ``validation`` rows, ``seconds`` so far.
        routing_: for each task the statistics of its gate on the validation rows, or on the train rows if
            there are none. ``verdict`` is "routes", "blends", "static" or "dense".
        routing_gain_: how much the loss on the same rows rises when rows exchange their routes: ``gain`` with
            its ``interval``. ``by_gate``, ``by_group`` (classes) and ``metrics`` have the same for each of
            them. ``mean_routes`` is that with the mean weights for all rows. None without a mixture.
        result_: loss and metrics on the validation rows with the final weights; number of parameters, rows,
            operations per row. ``notes`` name columns that were left out and gates that do not route.
        model_: the network, a :class:`~comet_moe.experiments.models.TableModel` in float64. Its weights were
            trained in float32. In float64 a prediction does not depend on the other rows of the call.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> from comet_moe.sklearn import MoEClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> classifier = MoEClassifier(experts=4, k=2, epochs=30, random_state=0).fit(X, y)
        >>> classifier.predict_proba(X).shape
        (150, 3)
        >>> classifier.score(X, y) > 0.9
        True
        >>> sorted(classifier.routing_)
        ['y']
    """

    gate: str = "comet"

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on rows ``X`` (N, columns) with classes ``y`` (N,); rows of weight 0 are left out."""
        y = _read_y(self, y)
        check_classification_targets(y)
        classes, codes = np.unique(y, return_inverse=True)
        kind: TargetKind = "binary" if len(classes) == 2 else "multiclass"
        target = Target(name="y", column="y", kind=kind, classes=[str(value) for value in classes])
        self._fit(X, [Column(target, codes.astype(np.float64))], sample_weight)
        self.classes_ = classes
        return self

    def predict_proba(self, X: Any) -> npt.NDArray[np.float64]:
        """Probabilities of the classes, (N, classes)."""
        (probability,) = self._predict(X)
        return two_columns(probability)

    def predict(self, X: Any) -> npt.NDArray[Any]:
        """The most probable class of each row, (N,)."""
        probability = self.predict_proba(X)
        return self.classes_[probability.argmax(-1)]


@dataclass(eq=False, repr=False)
class MoERegressor(RegressorMixin, BaseMoE):
    """A regressor: a sparse mixture of experts over a table's columns.

    The parameters and attributes are those of :class:`MoEClassifier`, without ``classes_``. The target is
    standardised for training: subtract its mean, divide by its standard deviation s. In ``history_`` and
    ``result_`` every ``loss`` is of that target, without a unit. Predictions and ``mae`` are in the units of
    ``y``, and ``mse`` in their square.

    Example:
        >>> from sklearn.datasets import load_diabetes
        >>> from comet_moe.sklearn import MoERegressor
        >>> X, y = load_diabetes(return_X_y=True)
        >>> regressor = MoERegressor(gate="topk", experts=4, epochs=30, random_state=0).fit(X, y)
        >>> regressor.predict(X).shape
        (442,)
        >>> regressor.routing_["y"]["experts_per_sample"]
        2.0
    """

    gate: str = "comet"

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on rows ``X`` (N, columns) with numbers ``y`` (N,); rows of weight 0 are left out."""
        read = _read_y(self, y)
        refuse_times("y", read.dtype)
        numbers = check_array(read, ensure_2d=False, dtype=np.float64, input_name="y")
        self._fit(X, [Column(Target(name="y", column="y", kind="regression"), numbers)], sample_weight)
        return self

    def predict(self, X: Any) -> npt.NDArray[np.float64]:
        """The predicted number of each row, (N,)."""
        return self._predict(X)[0]


def two_columns(probability: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Probabilities (N, classes), also from those of the second of two classes, (N,)."""
    if probability.ndim == 1:
        return np.column_stack([1 - probability, probability])
    return probability


def _read_y(estimator: BaseMoE, y: Any) -> npt.NDArray[Any]:
    """``y`` as an array (N,) without missing values."""
    if y is None:
        raise ValueError(
            f"{type(estimator).__name__} requires y to be passed, but the target y is None: give one value "
            f"for each row of X"
        )
    return check_array(column_or_1d(y, warn=True), ensure_2d=False, dtype=None, input_name="y")
