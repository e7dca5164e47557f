"""Tuning: a study of many trials, drawn first, run by workers on one machine or many."""

from comet_moe.tuning.beginning import OpenStudy, Request, begin_study
from comet_moe.tuning.definition import Definition, define
from comet_moe.tuning.errors import StudyProblem
from comet_moe.tuning.folder import StudyFolder
from comet_moe.tuning.pool import Pool
from comet_moe.tuning.queue import Queue, best, counts
from comet_moe.tuning.storage import Storage
from comet_moe.tuning.worker import Job

__all__ = [
    "Definition",
    "Job",
    "OpenStudy",
    "Pool",
    "Queue",
    "Request",
    "Storage",
    "StudyFolder",
    "StudyProblem",
    "begin_study",
    "best",
    "counts",
    "define",
]
