"""Tuning: a study of many trials, drawn first, run by workers on one machine or many."""

from comet_moe.exceptions import StudyError
from comet_moe.tuning.folder import OpenStudy, Request, StudyFolder, begin_study
from comet_moe.tuning.queue import Queue, best, counts
from comet_moe.tuning.storage import Storage
from comet_moe.tuning.study import Definition, define
from comet_moe.tuning.workers import Job, Pool

__all__ = [
    "Definition",
    "Job",
    "OpenStudy",
    "Pool",
    "Queue",
    "Request",
    "Storage",
    "StudyError",
    "StudyFolder",
    "begin_study",
    "best",
    "counts",
    "define",
]
