"""What the server of workers imports before it forks them; see `comet_moe.experiments.studies.pool`.

Nothing here starts a thread, which a fork would lose. The garbage collector of a worker leaves these modules
alone. It would write to all of them, and what a worker writes to takes memory of its own.
"""

import gc
from contextlib import suppress
from importlib import import_module

for module in ("comet_moe.experiments.studies.worker", "comet_moe.experiments.training.run", "numba"):
    with suppress(ImportError):  # numba is optional
        import_module(module)
gc.collect()
gc.freeze()
