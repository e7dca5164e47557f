"""COMET-BERT: a fine-tuned dense BERT turned into a sparse mixture of experts, and distilled.

Importing this room registers the models with the Auto classes of transformers, and our sparse dispatch as
``experts_implementation="comet_moe"`` of its own mixtures.
"""

try:
    import transformers as _transformers
except ImportError as error:
    raise ImportError("comet_moe.bert needs transformers: pip install 'comet-moe[bert]'") from error

from comet_moe.bert.configuration import CometBertConfig
from comet_moe.bert.convert import convert_bert, importance
from comet_moe.bert.modeling import (
    CometBertForQuestionAnswering,
    CometBertForSequenceClassification,
    CometBertModel,
)
from comet_moe.hf import experts as _experts_function
from comet_moe.hf.callbacks import SearchCallback

__all__ = [
    "CometBertConfig",
    "CometBertForQuestionAnswering",
    "CometBertForSequenceClassification",
    "CometBertModel",
    "SearchCallback",
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
_experts_function.register()
