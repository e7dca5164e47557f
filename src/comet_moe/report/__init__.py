"""The report: runs, studies and ablations as one HTML file. Nothing here needs torch."""

from comet_moe.report.page import write_report

__all__ = ["write_report"]
