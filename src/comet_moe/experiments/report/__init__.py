"""The report: runs, studies and ablations as one HTML file. It does not import torch."""

from comet_moe.experiments.report.page import check_extra, write_report

__all__ = ["check_extra", "write_report"]
