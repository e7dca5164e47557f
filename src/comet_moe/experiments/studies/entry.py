"""Where the process of a worker starts: it follows its parent from before the import of torch on."""

from multiprocessing.connection import Connection

from comet_moe.experiments.studies.process import WorkerConfig, end_with_parent


def run_worker_process(config: WorkerConfig, writer: Connection, number: int) -> None:
    """Run :func:`run_worker` in a process of its own, which does not outlive its parent."""
    end_with_parent()
    from comet_moe.experiments.studies.worker import run_worker

    run_worker(config, writer, number)
