"""Does a gate route? Statistics of its decisions, exact over any number of batches.

The weights g (B, n) of each row are divided by their sum. m = mean_b g_b is the mean weight of each expert,
and H the entropy in nats.

- experts per sample: mean over b of the number of weights above 1e-5.
- load: share of the samples that select an expert.
- load ratio: largest load / mean load, 1 if all loads are equal.
- effective experts: exp(H(m)), from 1 (all weight on one expert) to n (equal weights).
- information: H(m) - mean_b H(g_b), the mutual information between sample and expert in nats. It is 0 for a
  gate that makes the same decision for every sample, and log n for a hard and perfectly balanced gate.
- selection information: the entropy in nats of which experts are selected. It is 0 if the same experts run
  for every sample, whatever their weights are; that is what saves computation. With at most 12 experts it is
  the entropy of the selected set, and ``selection_measure`` is "sets". With more it is the mean over experts
  of the binary entropy of their load, at most log 2, and ``selection_measure`` is "loads".
- shared experts: Σ f_i² / Σ f_i of the loads f. Two samples drawn at random have this share of their experts
  in common. It is 1 if all samples run the same experts, and k / n if each chooses k at random.

:func:`comet_moe.verdict.verdict` sums them up in a word.
"""

from math import exp, log, prod
from typing import Any, Protocol

import torch
from torch import Tensor

from comet_moe.verdict import verdict

MAX_SET_EXPERTS = 12
"""Up to this number of experts, 4,096 sets, the selected sets are counted one by one."""

SELECTED_WEIGHT = 1e-5
"""An expert with more weight than this counts as selected, a tree within this of 1 as one-hot."""


class Weights(Protocol):
    """The part of a routing that the statistics read."""

    batch_shape: torch.Size
    num_experts: int
    mask: Tensor | None
    candidates: Tensor | None
    execution: str | None

    tree_pairs: Any

    @property
    def selectors(self) -> Tensor | None: ...  # noqa: D102
    @property
    def in_pairs(self) -> bool: ...  # noqa: D102
    @property
    def weights(self) -> Tensor: ...  # noqa: D102
    def pairs(self) -> tuple[Tensor, Tensor, Tensor]: ...  # noqa: D102


class RoutingStatistics:
    r"""Sums over the batches of one gate; padding is not counted.

    With the weights g of each row divided by their sum, m = mean_b g_b and H the entropy in nats,

    .. math:: \mathrm{effective\_experts} = \exp(H(m)), \qquad
        \mathrm{information} = H(m) - \frac{1}{B} \sum_{b=1}^B H(g_b), \qquad
        \mathrm{load\_ratio} = \frac{\max_i f_i}{\frac{1}{n} \sum_i f_i}

    where f_i is the share of the rows that select expert i.

    The sums stay on the gate's device, so that adding a batch does not synchronise an accelerator.

    Example:
        >>> import torch
        >>> from comet_moe import Routing
        >>> from comet_moe.statistics import RoutingStatistics
        >>> statistics = RoutingStatistics()
        >>> statistics.add(Routing(weights=torch.tensor([[1.0, 0.0], [1.0, 0.0]])))
        >>> statistics.add(Routing(weights=torch.tensor([[0.0, 1.0], [0.0, 1.0]])))
        >>> found = statistics.result()
        >>> round(found["information"], 4), found["effective_experts"], found["load_ratio"]
        (0.6931, 2.0, 1.0)
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._samples: int | Tensor = 0
        self._execution: str | None = None
        self._candidates: Tensor | None = None

    @torch.no_grad()
    def add(self, routing: Weights) -> None:
        """Add one batch."""
        self._samples = self._samples + (
            prod(routing.batch_shape) if routing.mask is None else routing.mask.sum()
        )
        self._execution, self._candidates = routing.execution, routing.candidates
        sums = _pair_sums(routing) if routing.in_pairs else _dense_sums(routing)
        if routing.tree_pairs is not None:
            sums |= _leaf_sums(routing)
        elif routing.selectors is not None:
            sums |= _tree_sums(routing.selectors, routing.mask)
        for name, value in sums.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def merge(self, other: "RoutingStatistics") -> None:
        """Add all batches of ``other``."""
        self._samples = self._samples + other._samples
        self._execution, self._candidates = other._execution, other._candidates
        for name, value in other._sums.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def result(self) -> dict[str, Any]:
        """Plain numbers and lists over all batches; at least one batch must have been added.

        - ``samples``, ``experts_per_sample``, ``effective_experts``, ``information``, ``load_ratio``.
        - ``share_of_samples``: the load of each of the n experts.
        - ``share_of_weight``: the mean weight of each of the n experts.
        - ``selection_information``, ``selection_measure`` and ``shared_experts``: see
          :mod:`comet_moe.statistics`.
        - ``dead_experts``: the experts that no sample selected.
        - ``num_choices``: number of experts that the gate chooses among. The load ratio and the dead experts
          count only these.
        - ``tree_entropy``: mean over samples and trees, in nats.
        - ``one_hot_trees``: share of the trees that are one-hot.
        - ``leaf_share``: k lists of n numbers, the mean distribution of each tree.
        - ``verdict``: "routes", "blends", "static" or "dense", see :func:`comet_moe.verdict.verdict`.
        - ``execution``: that of the last batch.

        The three values about trees are None for a gate without trees or selectors. They are also None if a
        batch lacks the selectors, which evaluation need not compute.
        """
        samples, sums = int(self._samples), self._sums
        count, weight, probability = sums["count"], sums["weight"], sums["probability"]
        routed = float(sums["routed"])  # rows that have an expert at all
        entropy_of_mean = float(torch.special.entr(probability / max(routed, 1.0)).sum())
        choices = torch.arange(len(count), device=count.device)
        choices = choices if self._candidates is None else self._candidates.sort().values
        own = count[choices]
        mean_load = float(own.mean())
        numbers: dict[str, Any] = {
            "experts_per_sample": float(count.sum()) / max(samples, 1),
            "information": max(0.0, entropy_of_mean - float(sums["entropy"]) / max(routed, 1.0)),
            "shared_experts": float((own**2).sum() / own.sum()) / max(routed, 1.0) if mean_load else 1.0,
            "num_choices": len(own),
        }
        return {
            "samples": samples,
            "share_of_samples": (count / max(samples, 1)).tolist(),
            "share_of_weight": (weight / weight.sum().clamp_min(1e-30)).tolist(),
            "effective_experts": exp(entropy_of_mean) if routed else 0.0,
            **self._selection(own, routed),
            "load_ratio": float(own.max()) / mean_load if mean_load else 1.0,
            "dead_experts": choices[own == 0].tolist(),
            **numbers,
            "verdict": verdict(**numbers),
            **self._trees(samples),
            "execution": self._execution,
        }

    def _selection(self, count: Tensor, routed: float) -> dict[str, Any]:
        """The entropy of what rows select, over the rows that select something."""
        if "sets" in self._sums:
            entropy = torch.special.entr(self._sums["sets"] / max(routed, 1.0)).sum()
            return {"selection_information": float(entropy), "selection_measure": "sets"}
        load = (count / max(routed, 1.0)).clamp(0, 1)
        entropy = (torch.special.entr(load) + torch.special.entr(1 - load)).mean()
        return {"selection_information": min(float(entropy), log(2)), "selection_measure": "loads"}

    def _trees(self, samples: int) -> dict[str, Any]:
        if "leaf" not in self._sums or int(self._sums["tree_rows"]) != samples:
            return {"tree_entropy": None, "one_hot_trees": None, "leaf_share": None}
        rows, trees = float(self._sums["tree_rows"]), self._sums["leaf"].shape[0]
        entropy, one_hot = (float(self._sums[name]) for name in ("tree_entropy", "one_hot"))
        return {
            "tree_entropy": entropy / max(rows * trees, 1.0),
            "one_hot_trees": one_hot / (rows * trees) if rows else 1.0,
            "leaf_share": (self._sums["leaf"] / max(rows, 1.0)).tolist(),
        }


class GroupStatistics:
    """Sums over batches of the weights that the samples of each group give to each expert.

    A group is any set of samples: a class, a domain, a value of a column. Weights count as in
    :class:`RoutingStatistics`, each row divided by its sum; padding and rows without an expert do not count.

    Args:
        num_groups: G, the number of groups.

    Example:
        >>> import torch
        >>> from comet_moe import Routing
        >>> from comet_moe.statistics import GroupStatistics
        >>> statistics = GroupStatistics(num_groups=2)
        >>> weights = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]])
        >>> statistics.add(Routing(weights=weights), torch.tensor([0, 0, 1]))
        >>> statistics.result()
        {'samples': [2, 1], 'shares': [[0.75, 0.25], [0.0, 1.0]]}
    """

    def __init__(self, num_groups: int) -> None:
        self.num_groups = num_groups
        self._weight: Tensor | None = None
        self._samples: Tensor | None = None

    @torch.no_grad()
    def add(self, routing: Weights, groups: Tensor) -> None:
        """Add one batch; ``groups`` has the group of each of its rows, integers (B, ...) below G."""
        n = routing.num_experts
        if routing.in_pairs:
            sample, expert, _, probability, row_sum = _pair_probability(routing)
            groups = groups.flatten().to(sample.device, torch.int64)
            cells = torch.bincount(
                groups[sample] * n + expert, weights=probability, minlength=self.num_groups * n
            )
            weight = cells.reshape(self.num_groups, n)
        else:
            _, probability, row_sum = _dense_probability(routing)
            groups = groups.flatten().to(probability.device, torch.int64)
            weight = probability.new_zeros((self.num_groups, n), dtype=torch.float64)
            weight.index_add_(0, groups, probability.double())
        samples = torch.bincount(groups, weights=(row_sum.flatten() > 0).double(), minlength=self.num_groups)
        self._weight = weight if self._weight is None else self._weight + weight
        self._samples = samples if self._samples is None else self._samples + samples

    def result(self) -> dict[str, Any]:
        """``samples``, G counts, and ``shares``, (G, n) mean weights; at least one batch must be added."""
        assert self._weight is not None
        assert self._samples is not None
        shares = self._weight / self._samples.clamp_min(1).unsqueeze(-1)
        return {"samples": [int(count) for count in self._samples.tolist()], "shares": shares.tolist()}


def _dense_sums(routing: Weights) -> dict[str, Tensor]:
    weights, probability, row_sum = _dense_probability(routing)
    selected = weights > SELECTED_WEIGHT
    sets = {}
    if routing.num_experts <= MAX_SET_EXPERTS:
        sets = _count_sets((selected * _bits(selected)).sum(-1), routing.num_experts)
    return sets | {
        "count": selected.sum(0).double(),
        "weight": weights.sum(0, dtype=torch.float64),
        "probability": probability.sum(0, dtype=torch.float64),
        "entropy": torch.special.entr(probability).sum(dtype=torch.float64),
        "routed": (row_sum > 0).sum().double(),
    }


def _with_float64(tensor: Tensor) -> Tensor:
    """``tensor``, moved to the CPU if its device has no float64, as on MPS."""
    return tensor.cpu() if tensor.device.type == "mps" else tensor


def _dense_probability(routing: Weights) -> tuple[Tensor, Tensor, Tensor]:
    """Weights (rows, n), the weights divided by their row sums, and the row sums (rows, 1)."""
    weights = _with_float64(routing.weights).reshape(-1, routing.num_experts)
    row_sum = weights.sum(-1, keepdim=True)
    return weights, weights / row_sum.masked_fill(row_sum == 0, 1.0), row_sum


def _pair_sums(routing: Weights) -> dict[str, Tensor]:
    sample, expert, weight, probability, row_sum = _pair_probability(routing)
    n = routing.num_experts
    sets = {}
    if n <= MAX_SET_EXPERTS:
        bits = (weight > SELECTED_WEIGHT) << expert
        sets = _count_sets(bits.new_zeros(len(row_sum)).index_add(0, sample, bits), n)
    return sets | {
        "count": torch.bincount(expert[weight > SELECTED_WEIGHT], minlength=n).double(),
        "weight": torch.bincount(expert, weights=weight, minlength=n),
        "probability": torch.bincount(expert, weights=probability, minlength=n),
        "entropy": torch.special.entr(probability).sum(),
        "routed": (row_sum > 0).sum().double(),
    }


def _bits(selected: Tensor) -> Tensor:
    """2^i for expert i, (n,)."""
    return 2 ** torch.arange(selected.shape[-1], device=selected.device)


def _count_sets(codes: Tensor, num_experts: int) -> dict[str, Tensor]:
    """How many rows select each set of experts, (2^n,), from the sum of 2^i over the selected ones."""
    counts = torch.bincount(codes, minlength=2**num_experts).double()
    counts[0] = 0  # padding, and rows without an expert
    return {"sets": counts}


def _pair_probability(routing: Weights) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Sample, expert, weight (pairs,), the weight divided by its row sum, and the row sums (rows,)."""
    sample, expert, weight = (_with_float64(part) for part in routing.pairs())
    weight = weight.double()
    row_sum = weight.new_zeros(prod(routing.batch_shape)).index_add(0, sample, weight)
    return sample, expert, weight, weight / row_sum[sample], row_sum


def _tree_sums(selectors: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
    """Sums over (B, ..., k, n) distributions; padding does not count."""
    trees = _with_float64(selectors).flatten(0, -3)  # (rows, k, n)
    mask = None if mask is None else _with_float64(mask)
    rows = torch.ones(len(trees), device=trees.device) if mask is None else mask.flatten().to(trees.dtype)
    entropy = torch.special.entr(trees).sum((-2, -1))
    one_hot = (trees.amax(-1) > 1 - SELECTED_WEIGHT).sum(-1)
    leaf = trees if mask is None else trees * rows[:, None, None]
    return {
        "tree_entropy": (entropy * rows).sum(dtype=torch.float64),
        "one_hot": (one_hot * rows).sum(dtype=torch.float64),
        "leaf": leaf.sum(0, dtype=torch.float64),
        "tree_rows": rows.sum(dtype=torch.float64),
    }


def _leaf_sums(routing: Weights) -> dict[str, Tensor]:
    """As :func:`_tree_sums`, from the leaves that rows reach."""
    leaves, n = routing.tree_pairs, routing.num_experts
    path = leaves.probability.double()
    if routing.mask is not None:
        path = path * routing.mask.flatten()[leaves.sample]
    leaf = torch.bincount(leaves.tree * n + leaves.expert, weights=path, minlength=leaves.trees * n)
    rows = prod(routing.batch_shape) if routing.mask is None else routing.mask.sum()
    return {
        "tree_entropy": torch.special.entr(path).sum(),
        "one_hot": (path > 1 - SELECTED_WEIGHT).sum().double(),
        "leaf": leaf.reshape(leaves.trees, n),
        "tree_rows": torch.as_tensor(rows, dtype=torch.float64, device=path.device),
    }
