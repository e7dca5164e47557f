"""Experiments as YAML, one file each, and the schemas they are checked against."""

from comet_moe.config.bert_schema import BertRun
from comet_moe.config.loader import (
    Experiment,
    Override,
    check_agreement,
    load_bert_recipe,
    load_experiment,
    load_recipe,
    parse_setting,
    recipe_names,
)
from comet_moe.config.schema import GATE_NAMES, Config
from comet_moe.config.search_space import Choice, Draw, LogUniform, Space, Uniform, load_space, with_values
from comet_moe.exceptions import RecipeError

__all__ = [
    "GATE_NAMES",
    "BertRun",
    "Choice",
    "Config",
    "Draw",
    "Experiment",
    "LogUniform",
    "Override",
    "RecipeError",
    "Space",
    "Uniform",
    "check_agreement",
    "load_bert_recipe",
    "load_experiment",
    "load_recipe",
    "load_space",
    "parse_setting",
    "recipe_names",
    "with_values",
]
