"""Many images: folders and lists are explained batch by batch, with a journal from which an interrupted run goes on."""

from visattn.batch.items import Item
from visattn.batch.journal import Entry, Journal, other_lists
from visattn.batch.running import Ledger, Outcome, run
from visattn.batch.sources import Batches, items_of
from visattn.batch.wanted import Wanted, check_outputs
from visattn.batch.work import Work
from visattn.core.pipeline.batches import Asked

__all__ = [
    "Asked",
    "Batches",
    "Entry",
    "Item",
    "Journal",
    "Ledger",
    "Outcome",
    "Wanted",
    "Work",
    "check_outputs",
    "items_of",
    "other_lists",
    "run",
]
