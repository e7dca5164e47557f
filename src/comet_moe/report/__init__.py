"""The report: runs, studies and ablations as one HTML file. It does not import torch."""

from comet_moe.report.page import write_report

__all__ = ["write_report"]
