"""The networks of recipes: those of the paper, and one for tables of any columns.

All are a :class:`~comet_moe.experiments.models.base.Model`. :mod:`~comet_moe.experiments.models.build` makes
one from a configuration.
"""

from comet_moe.experiments.models.base import Model, Task, image_tasks, rating_tasks
from comet_moe.experiments.models.networks import ImageModel, RatingModel, TableModel

__all__ = ["ImageModel", "Model", "RatingModel", "TableModel", "Task", "image_tasks", "rating_tasks"]
