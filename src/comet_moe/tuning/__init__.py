"""Tuning: studies of many trials, run by worker processes on one machine or on many.

Import from the modules: :mod:`~comet_moe.tuning.study` (create or resume a study),
:mod:`~comet_moe.tuning.pool` (its workers on this machine), :mod:`~comet_moe.tuning.queue` (its trials).
Storage and queue need the extra ``tune``.
"""
