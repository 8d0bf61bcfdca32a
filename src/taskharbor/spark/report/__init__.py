"""One self-contained HTML page about a history of jobs, and a summary of it for the terminal.

queries     Spark queries over the tables of a lake
collect     the numbers, from the results of the queries
data        the numbers of the report, and the buckets of time that they are counted in
sections    sections with charts, from the numbers
charts      geometry of the charts, and the marks of their axes
formatting  numbers and times as text
page        the HTML file, by the templates in `templates/`
summary     the numbers for a terminal
"""

from __future__ import annotations

from taskharbor.spark.report.collect import collect
from taskharbor.spark.report.data import ReportData
from taskharbor.spark.report.page import render, write_page, write_report
from taskharbor.spark.report.summary import summary

__all__ = ["ReportData", "collect", "render", "summary", "write_page", "write_report"]
