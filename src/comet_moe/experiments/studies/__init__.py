"""Studies: many trials, run by worker processes on one machine or on many, and what their results say.

Start with ``study`` (create or resume a study), ``pool`` (its workers here), ``queue`` (its trials) and
``reading`` (finished studies). Storage and queue need the extra ``tune``; reading and tables need neither
Optuna nor torch.
"""
