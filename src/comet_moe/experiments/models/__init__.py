"""The networks of recipes: those of the paper, and one for tables of any columns.

All are a :class:`~comet_moe.experiments.models.base.Model`. :mod:`~comet_moe.experiments.models.build` makes
one from a configuration.
"""

from comet_moe.experiments.models.base import Model
from comet_moe.experiments.models.paper import ImageModel, RatingModel
from comet_moe.experiments.models.table import TableModel
from comet_moe.experiments.models.tasks import Task, image_tasks, rating_tasks

__all__ = ["ImageModel", "Model", "RatingModel", "TableModel", "Task", "image_tasks", "rating_tasks"]
