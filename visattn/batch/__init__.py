"""Many images: folders and lists are explained batch by batch, with a journal from which an interrupted run goes on."""

from typing import TYPE_CHECKING

from visattn._support.faces import face

if TYPE_CHECKING:
    from visattn.batch.beside import apart as apart, masks_of as masks_of, texts_of as texts_of
    from visattn.batch.films import explain_video as explain_video
    from visattn.batch.image_sources import Batches as Batches, items_of as items_of
    from visattn.batch.image_work import Work as Work
    from visattn.batch.items import Item as Item
    from visattn.batch.journal import Entry as Entry, Journal as Journal, other_lists as other_lists
    from visattn.batch.local_run import Ledger as Ledger, Outcome as Outcome, run as run
    from visattn.batch.wanted import Wanted as Wanted, check_outputs as check_outputs
    from visattn.core.pipeline.asking import Asked as Asked
else:
    __getattr__, __dir__, __all__ = face(
        __name__,
        {
            "visattn.core.pipeline.asking": ["Asked"],
            ".beside": ["apart", "masks_of", "texts_of"],
            ".films": ["explain_video"],
            ".items": ["Item"],
            ".journal": ["Entry", "Journal", "other_lists"],
            ".local_run": ["Ledger", "Outcome", "run"],
            ".image_sources": ["Batches", "items_of"],
            ".wanted": ["Wanted", "check_outputs"],
            ".image_work": ["Work"],
        },
    )
