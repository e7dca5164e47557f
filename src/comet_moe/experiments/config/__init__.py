"""Configurations: the schema of every setting, the loader of recipes, and their search spaces."""

from comet_moe.exceptions import RecipeError
from comet_moe.experiments.config.bert_schema import BertConfig
from comet_moe.experiments.config.loader import (
    AnyConfig,
    Override,
    check_same_settings,
    list_recipes,
    load_bert_config,
    load_config,
    load_train_config,
    override_config,
    parse_setting,
    recipe_name,
    resolve_gates,
)
from comet_moe.experiments.config.schema import TrainConfig
from comet_moe.experiments.config.search_space import (
    Choice,
    Distribution,
    LogUniform,
    SearchSpace,
    Uniform,
    load_search_space,
)

__all__ = [
    "AnyConfig",
    "BertConfig",
    "Choice",
    "Distribution",
    "LogUniform",
    "Override",
    "RecipeError",
    "SearchSpace",
    "TrainConfig",
    "Uniform",
    "check_same_settings",
    "list_recipes",
    "load_bert_config",
    "load_config",
    "load_search_space",
    "load_train_config",
    "override_config",
    "parse_setting",
    "recipe_name",
    "resolve_gates",
]
