"""One self-contained HTML page about everything that happened, and a summary of it for the terminal.

data      what the report shows, as plain numbers
collect   the numbers, from the tables of a lake: `span`, `movements`, `overall` and `assembly` are its parts
page      the numbers as HTML: `sections` are plots, `tables` words; `plots`, `bars`, `frame`, `ticks` and `svg` draw
summary   the numbers for a terminal
writing   all of it, into a file
"""

from __future__ import annotations

from taskharbor.spark.report.collect import collect
from taskharbor.spark.report.data import ReportData
from taskharbor.spark.report.page import render
from taskharbor.spark.report.summary import summary
from taskharbor.spark.report.writing import write_page, write_report

__all__ = ["ReportData", "collect", "render", "summary", "write_page", "write_report"]
