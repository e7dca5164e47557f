"""Experiments as YAML, one file each, and the schema they are checked against."""

from comet_moe.recipes.loading import RecipeError, load_recipe, recipe_names
from comet_moe.recipes.schema import GATE_NAMES, Config

__all__ = ["GATE_NAMES", "Config", "RecipeError", "load_recipe", "recipe_names"]
