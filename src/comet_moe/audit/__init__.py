"""Does the router of a mixture work? ``comet_moe.audit(model, batches, loss)`` measures and says.

The module can be called: ``comet_moe.audit(...)`` is :func:`comet_moe.audit.audit`.
"""

import sys
from types import ModuleType
from typing import Any

from comet_moe.audit.findings import CODES
from comet_moe.audit.pruning import prune
from comet_moe.audit.report import Finding, LayerReport, Report
from comet_moe.audit.run import audit
from comet_moe.mixture.visits import Mixture, find_mixtures

__all__ = ["CODES", "Finding", "LayerReport", "Mixture", "Report", "audit", "find_mixtures", "prune"]


class _CallableModule(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Report:
        return audit(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
