"""BERT with mixtures of experts in place of its feed-forward layers, for transformers.

Shapes: B sentences, T tokens, p features, E experts.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertForQuestionAnswering, BertForSequenceClassification, BertModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_outputs import (
    BaseModelOutputWithPoolingAndCrossAttentions,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
)
from transformers.models.bert.modeling_bert import BertLayer
from transformers.utils.generic import can_return_tuple

from comet_moe.bert.configuration import CometBertConfig
from comet_moe.bert.gating import build_layer_gate
from comet_moe.experts import Experts
from comet_moe.experts.grouped_linear import GroupedLinear
from comet_moe.files import align_weights
from comet_moe.gates.base import TrainableGate
from comet_moe.gates.hash import HashGate
from comet_moe.gates.warmup import WarmupGate
from comet_moe.local_search import Permutation
from comet_moe.mixture.dispatch import Execution
from comet_moe.mixture.moe import MoE
from comet_moe.routing import Routing


class BertExperts(Experts):
    """f_e(x) = LayerNorm_e(dropout(B_e activation(A_e x + a_e) + b_e) + x), as in MoEBERT.

    The mixture weights the outputs of the LayerNorms.

    Args:
        num_experts: E.
        features: p.
        neurons: number of neurons per expert.
        activation: elementwise function between the two layers.
        dropout: probability of a zero in training.
        epsilon: added to the variance in LayerNorm.

    Attributes:
        inner, outer: the layers A, a (E, neurons, p) and B, b (E, p, neurons).
        norm_weight, norm_bias: (E, p).
    """

    def __init__(
        self,
        num_experts: int,
        features: int,
        neurons: int,
        activation: Callable[[Tensor], Tensor],
        dropout: float,
        epsilon: float,
    ):
        super().__init__()
        self.num_experts = num_experts
        self.inner = GroupedLinear(num_experts, features, neurons)
        self.outer = GroupedLinear(num_experts, neurons, features)
        self.norm_weight = nn.Parameter(torch.ones(num_experts, features))
        self.norm_bias = nn.Parameter(torch.zeros(num_experts, features))
        self.activation = activation
        self.dropout = dropout
        self.epsilon = epsilon

    def flops(self) -> int:
        """Floating-point operations per row and expert, of both layers."""
        return self.inner.flops() + self.outer.flops()

    def dense(self, x: Tensor) -> Tensor:
        """(B, p) -> (B, E, p)."""
        out = self._dropout(self.outer.each(self.activation(self.inner.shared(x)))) + x.unsqueeze(1)
        return F.layer_norm(out, out.shape[-1:], eps=self.epsilon) * self.norm_weight + self.norm_bias

    def one(self, rows: Tensor, expert: int) -> Tensor:
        """(m, p) -> (m, p)."""
        hidden = self.activation(self.inner.one(rows, expert))
        return self._norm(self._dropout(self.outer.one(hidden, expert)) + rows, expert)

    def sparse(self, rows: Tensor, counts: list[int]) -> Tensor:
        """(M, p) -> (M, p)."""
        hidden = self.activation(self.inner.grouped(rows, counts))
        out = self._dropout(self.outer.grouped(hidden, counts)) + rows
        return torch.cat([self._norm(part, expert) for expert, part in enumerate(out.split(counts))])

    def _dropout(self, out: Tensor) -> Tensor:
        return F.dropout(out, self.dropout, self.training)

    def _norm(self, out: Tensor, expert: int) -> Tensor:
        return F.layer_norm(
            out, out.shape[-1:], self.norm_weight[expert], self.norm_bias[expert], self.epsilon
        )


@dataclass(frozen=True)
class LayerInputs:
    """The inputs of the layers other than hidden states.

    Attributes:
        ids: (B, T) or None.
        mask: (B, T) bool, False where a token is padding, or None.
        routings: a list to which each layer appends its routing.
    """

    ids: Tensor | None
    mask: Tensor | None
    routings: list[Routing] = field(default_factory=list)


class CometBertLayer(BertLayer):
    """Attention, then the mixture of experts. Padding skips the mixture: it keeps the attention's output."""

    def __init__(self, config: CometBertConfig, layer_idx: int):
        with init.no_init_weights():
            super().__init__(config, layer_idx)
        del self.intermediate, self.output  # the dense feed-forward layer
        self.moe = MoE(
            experts=BertExperts(
                config.num_experts,
                config.hidden_size,
                config.expert_size,
                ACT2FN[config.hidden_act],
                config.hidden_dropout_prob,
                config.layer_norm_eps,
            ),
            gate=build_layer_gate(config, layer_idx),
            execution=cast(Execution, config.execution),
        )

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *unused: Any,  # encoder_hidden_states and others; the configuration refuses decoders
        tokens: LayerInputs,
        **kwargs: Any,
    ) -> Tensor:
        """(B, T, p) -> (B, T, p)."""
        for name in ("encoder_attention_mask", "past_key_values"):
            kwargs.pop(name, None)
        attended, _ = self.attention(hidden_states, attention_mask, **kwargs)
        mixed, routing = self.moe(attended, keys=tokens.ids, mask=tokens.mask)
        tokens.routings.append(routing)
        return mixed if tokens.mask is None else torch.where(tokens.mask.unsqueeze(-1), mixed, attended)


class SparseModel:
    """What the classes of this model share: their configuration, first values of weights, and loading.

    Each is first built as a dense model without values; ``post_init`` then draws those that remain.
    """

    config_class: Any = CometBertConfig
    _no_split_modules: Any = ("BertEmbeddings", "CometBertLayer")
    accepts_loss_kwargs = False  # the loss is a mean over the batch
    adds_aux_loss = True  # of the gates, in training

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, into aligned memory, see :func:`~comet_moe.files.align_weights`."""
        loaded = super().from_pretrained(*args, **kwargs)  # type: ignore[misc]
        align_weights(loaded[0] if isinstance(loaded, tuple) else loaded)  # with output_loading_info, a tuple
        return loaded

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[misc]
        if isinstance(module, TrainableGate | HashGate | WarmupGate):
            module.reset_parameters()  # type: ignore[operator]
        elif isinstance(module, GroupedLinear):
            init.normal_(module.weight, std=self.config.initializer_range)  # type: ignore[attr-defined]
            init.zeros_(module.bias)
        elif isinstance(module, BertExperts):
            init.ones_(module.norm_weight)
            init.zeros_(module.norm_bias)
        elif isinstance(module, Permutation):
            _reset_search(module)


def _reset_search(search: Permutation) -> None:
    """Give ``search`` the first values of a new one, except for those that were loaded."""
    new = Permutation(search.num_experts, search.steps, trees=search.trees, gumbel=search.gumbel)
    for name, value in new.state_dict().items():
        init.copy_(getattr(search, name), value)


@dataclass
class CometBertModelOutput(BaseModelOutputWithPoolingAndCrossAttentions):
    """As BERT's, with the ``aux_loss`` of the gates, to add to the loss; None in eval mode."""

    aux_loss: Tensor | None = None


class CometBertModel(SparseModel, BertModel):
    """The encoder. ``forward`` adds one :class:`~comet_moe.Routing` per layer to the list ``routings``."""

    def __init__(self, config: CometBertConfig, add_pooling_layer: bool = True):
        with init.no_init_weights():
            super().__init__(config, add_pooling_layer)
        layers = range(config.num_hidden_layers)
        self.encoder.layer = nn.ModuleList([CometBertLayer(config, layer) for layer in layers])
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *args: Any,
        routings: list[Routing] | None = None,
        **kwargs: Any,
    ) -> CometBertModelOutput:
        """As BERT's; ``attention_mask`` (B, T) is 0 where a token is padding, which no expert gets."""
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError(
                f"attention_mask must have shape (B, T), from which the gates know padding, "
                f"got {tuple(attention_mask.shape)}"
            )
        if input_ids is None and self.config.kind == "hash":
            raise ValueError("a hash gate routes by token id: give input_ids, not inputs_embeds")
        mask = None if attention_mask is None else attention_mask != 0
        tokens = LayerInputs(input_ids, mask)
        outputs = super().forward(input_ids, attention_mask, *args, tokens=tokens, return_dict=True, **kwargs)
        aux_loss = total_aux_loss(tokens.routings) if self.training else None
        if routings is not None:
            routings.extend(tokens.routings)
        return CometBertModelOutput(**outputs, aux_loss=aux_loss)


def total_aux_loss(routings: list[Routing]) -> Tensor:
    """The sum over layers of entropy, load-balancing, reachability and local-search losses."""
    return torch.stack([routing.aux_loss for routing in routings]).sum()


def _sparse_forward(forward: Any, output_class: type[Any]) -> Any:
    """``forward`` of a BERT with a head, with ``routings`` as for :class:`CometBertModel`.

    In training the auxiliary losses are added to the loss. The signature is that of ``forward``, from which
    the Trainer of transformers knows the names of the columns.
    """

    @can_return_tuple
    @wraps(forward)
    def with_aux_loss(self: Any, *args: Any, routings: list[Routing] | None = None, **kwargs: Any) -> Any:
        own: list[Routing] = []
        fields = dict(forward(self, *args, routings=own, return_dict=True, **kwargs))
        if self.training:
            fields["aux_loss"] = total_aux_loss(own)
            if "loss" in fields:
                fields["loss"] = fields["loss"] + fields["aux_loss"]
        if routings is not None:
            routings.extend(own)
        return output_class(**fields)

    return with_aux_loss


@dataclass
class CometBertClassifierOutput(SequenceClassifierOutput):
    """As BERT's; in training ``loss`` includes the ``aux_loss`` of the gates, which is None in eval mode."""

    aux_loss: Tensor | None = None


class CometBertForSequenceClassification(SparseModel, BertForSequenceClassification):
    """Classifies a sentence or a pair of sentences."""

    def __init__(self, config: CometBertConfig):
        with init.no_init_weights():
            super().__init__(config)
        self.bert = CometBertModel(config)
        self.post_init()

    forward = _sparse_forward(BertForSequenceClassification.forward, CometBertClassifierOutput)


@dataclass
class CometBertAnswerOutput(QuestionAnsweringModelOutput):
    """As BERT's; in training ``loss`` includes the ``aux_loss`` of the gates, which is None in eval mode."""

    aux_loss: Tensor | None = None


class CometBertForQuestionAnswering(SparseModel, BertForQuestionAnswering):
    """Finds the first and last token of the answer to a question in a context."""

    def __init__(self, config: CometBertConfig):
        with init.no_init_weights():
            super().__init__(config)
        self.bert = CometBertModel(config, add_pooling_layer=False)
        self.post_init()

    forward = _sparse_forward(BertForQuestionAnswering.forward, CometBertAnswerOutput)
