"""Experiments as YAML, one file each, and the schemas they are checked against."""

from comet_moe.config.bert_schema import BertConfig
from comet_moe.config.loader import (
    AnyConfig,
    Override,
    check_same_settings,
    load_bert_recipe,
    load_config,
    load_recipe,
    parse_setting,
    recipe_names,
)
from comet_moe.config.schema import GATE_NAMES, Config
from comet_moe.config.search_space import (
    Choice,
    Draw,
    LogUniform,
    SearchSpace,
    Uniform,
    load_search_space,
    with_values,
)
from comet_moe.exceptions import RecipeError

__all__ = [
    "GATE_NAMES",
    "AnyConfig",
    "BertConfig",
    "Choice",
    "Config",
    "Draw",
    "LogUniform",
    "Override",
    "RecipeError",
    "SearchSpace",
    "Uniform",
    "check_same_settings",
    "load_bert_recipe",
    "load_config",
    "load_recipe",
    "load_search_space",
    "parse_setting",
    "recipe_names",
    "with_values",
]
