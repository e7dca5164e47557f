"""The networks of the paper's experiments, and one for tables of any columns."""

from comet_moe.experiments.models.image import ImageModel
from comet_moe.experiments.models.rating import RatingModel
from comet_moe.experiments.models.table import TableModel
from comet_moe.experiments.models.tasks import Task, image_tasks, rating_tasks

Model = RatingModel | ImageModel | TableModel
"""Any network of a recipe: features in, one output and one routing per task out."""

__all__ = ["ImageModel", "Model", "RatingModel", "TableModel", "Task", "image_tasks", "rating_tasks"]
