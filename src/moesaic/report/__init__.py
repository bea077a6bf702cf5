"""A run's :class:`~moesaic.record.Record` for people: card, terminal and page of the same blocks.

Nothing here measures, and nothing here knows any method: every sentence about what was done
stands in the record. What was not measured is left out.
"""

from moesaic.report.facts import title
from moesaic.report.markdown import model_card, verdict
from moesaic.report.page import frontier_picture, html
from moesaic.report.terminal import speeds, terminal

__all__ = ["frontier_picture", "html", "model_card", "speeds", "terminal", "title", "verdict"]
