"""What a run's ``result.json`` says, for people: a page, a model card, a terminal, a picture.

Nothing here measures or computes beyond formatting: what is not in the record is left out.
"""

from moesaic.report.card import model_card
from moesaic.report.console import terminal
from moesaic.report.dynamic import sweep
from moesaic.report.page import html
from moesaic.report.picture import picture
from moesaic.report.words import speed_words

__all__ = ["html", "model_card", "picture", "speed_words", "sweep", "terminal"]
