"""A run's :class:`~moesaic.record.Record` for people: a page, a model card, a terminal, a picture.

Nothing here measures, and nothing is known here of any method: everything that is said of what
was done stands in the record. What was not measured is left out.
"""

from moesaic.report.card import model_card, verdict
from moesaic.report.console import terminal
from moesaic.report.page import html
from moesaic.report.picture import frontier_picture, picture
from moesaic.report.read import title
from moesaic.report.words import speed_words

__all__ = [
    "frontier_picture",
    "html",
    "model_card",
    "picture",
    "speed_words",
    "terminal",
    "title",
    "verdict",
]
