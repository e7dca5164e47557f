"""Experiments as YAML, one file each, and the schema they are checked against."""

from comet_moe.recipes.loading import RecipeError, check_agreement, load_recipe, parse_setting, recipe_names
from comet_moe.recipes.schema import GATE_NAMES, Config

__all__ = [
    "GATE_NAMES",
    "Config",
    "RecipeError",
    "check_agreement",
    "load_recipe",
    "parse_setting",
    "recipe_names",
]
