"""The run as a page and a picture: report.html and the curves."""

from .page import save_curves, write_report

__all__ = ["save_curves", "write_report"]
