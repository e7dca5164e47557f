"""Estimators of scikit-learn: mixtures of experts on arrays and DataFrames."""

from comet_moe.exceptions import needs_extra

with needs_extra("sklearn", "comet_moe.sklearn"):
    from comet_moe.sklearn.estimators import MoEClassifier, MoERegressor
    from comet_moe.sklearn.multi_task import MultiTaskMoE

__all__ = ["MoEClassifier", "MoERegressor", "MultiTaskMoE"]
