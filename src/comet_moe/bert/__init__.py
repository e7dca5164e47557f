"""COMET-BERT: a fine-tuned dense BERT converted to a sparse mixture of experts, and distilled.

Importing this package registers its models with the Auto classes of transformers, and the sparse dispatch of
this library as ``experts_implementation="comet_moe"`` of transformers' own mixtures.
"""

from comet_moe.exceptions import needs_extra

with needs_extra("bert", "comet_moe.bert"):
    import transformers as _transformers

from comet_moe.bert.configuration import CometBertConfig
from comet_moe.bert.convert import convert_bert
from comet_moe.bert.modeling import (
    CometBertForQuestionAnswering,
    CometBertForSequenceClassification,
    CometBertModel,
)
from comet_moe.hf import MoECallback, importance

__all__ = [
    "CometBertConfig",
    "CometBertForQuestionAnswering",
    "CometBertForSequenceClassification",
    "CometBertModel",
    "MoECallback",
    "convert_bert",
    "importance",
]

_transformers.AutoConfig.register(CometBertConfig.model_type, CometBertConfig, exist_ok=True)
for _auto, _model in (
    (_transformers.AutoModel, CometBertModel),
    (_transformers.AutoModelForSequenceClassification, CometBertForSequenceClassification),
    (_transformers.AutoModelForQuestionAnswering, CometBertForQuestionAnswering),
):
    _auto.register(CometBertConfig, _model, exist_ok=True)
