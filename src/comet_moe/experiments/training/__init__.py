"""Training: from a recipe to the folder of a finished run, and from there to its model again.

Import from the modules:

- :mod:`~comet_moe.experiments.training.run`: the folder of a run.
- :mod:`~comet_moe.experiments.training.recipe`: its trainer, and its model loaded again.
- :mod:`~comet_moe.experiments.training.trainer`: the loop.
- :mod:`~comet_moe.experiments.training.records`: what a run writes, without torch.
"""
