"""Many images: folders and lists are explained batch by batch, with a journal from which an interrupted run goes on."""

from visattn.batch.journal import Entry, Journal
from visattn.batch.running import Batches, Ledger, Outcome, run
from visattn.batch.sources import Item, items_of
from visattn.batch.work import Wanted, Work
from visattn.pipeline.batches import Asked

__all__ = ["Asked", "Batches", "Entry", "Item", "Journal", "Ledger", "Outcome", "Wanted", "Work", "items_of", "run"]
