"""Training: from a recipe to the folder of a finished run, and from there to its model again.

Import from the modules: :mod:`~comet_moe.experiments.training.build` (a trainer from a recipe),
:mod:`~comet_moe.experiments.training.trainer` (the loop),
:mod:`~comet_moe.experiments.training.run` (the folder of a run),
:mod:`~comet_moe.experiments.training.records` (what it writes, without torch).
"""
