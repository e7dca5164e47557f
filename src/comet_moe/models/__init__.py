"""The networks of the paper's experiments."""

from comet_moe.models.image import ImageModel
from comet_moe.models.rating import RatingModel
from comet_moe.models.tasks import Task, image_tasks, rating_tasks

__all__ = ["ImageModel", "RatingModel", "Task", "image_tasks", "rating_tasks"]
