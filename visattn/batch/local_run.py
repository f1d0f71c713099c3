"""Run over many images on this machine, and what runs on any machines share: which batches are left, and the journal."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import nn

from visattn._support.types import MAX_BYTES
from visattn._support.untrusted import inside
from visattn.batch.image_sources import Batches
from visattn.batch.image_work import Batch, Work, done
from visattn.batch.items import Item
from visattn.batch.journal import Entry, Journal
from visattn.batch.wanted import Wanted


class Outcome(NamedTuple):
    """Numbers of a run.

    Attributes:
        written: Images that were explained now.
        kept: Images that an earlier run had explained.
        failed: Images that could not be explained.
    """

    written: int
    kept: int
    failed: int


class Ledger:
    """Images of a run, and what has become of them.

    Attributes:
        outcome: Numbers of images so far.
        spare: Folder for files that are not whole yet. The journal is locked, so no other run uses it.
    """

    def __init__(
        self,
        items: Sequence[Item],
        journal: Journal,
        batches: Batches,
        told: Callable[[Entry], None] = lambda entry: None,
        max_bytes: int = MAX_BYTES,
        wanted: Wanted | None = None,
    ) -> None:
        """Open a ledger.

        Args:
            items: The images.
            journal: Journal of the run, in the output folder.
            batches: Batches that are computed. Which images share a batch does not depend on what was done before.
            told: Function that is called with each entry once it is in the journal.
            max_bytes: Largest size of a file that is read.
            wanted: Files that are written for each image; an image for which the journal names others is computed again.
        """
        self.outcome = Outcome(0, 0, 0)
        self.spare = journal.path.with_name(f".{journal.path.name}.files")
        self._items, self._journal, self._batches, self._told = items, journal, batches, told
        self._max_bytes, self._wanted = max_bytes, wanted

    def first_kept(self) -> tuple[Item, Entry] | None:
        """Return the first image that an earlier run explained with these settings, and whose results are kept; None if there is none."""
        for first in self._batches.first(len(self._items)):
            some = self._items[first : first + self._batches.size]
            if first in self._journal.comparable and self._is_done(some, first):
                return some[0], self._journal.known[first]
        return None

    def left(self) -> Iterator[Batch]:
        """Yield the batches that must be computed.

        A batch is left out if the journal knows all its images with the same content and without an error, and their files are there. So
        a run that was interrupted gives the files of one that was not.
        """
        for first in self._batches.first(len(self._items)):
            some = self._items[first : first + self._batches.size]
            if not self._is_done(some, first):
                if self._wanted:
                    self._journal.intend(file for item in some for file in self._wanted.names(item.name, first))
                yield Batch(first, some)
                continue
            self.outcome = self.outcome._replace(kept=self.outcome.kept + len(some))
            for number in range(first, first + len(some)):
                self._told(self._journal.known[number])

    def settle(self, entries: Sequence[Entry]) -> None:
        """Enter the images of a batch in the journal."""
        gone = [Entry(number, "", "", "", error="not given any more") for number in self._gone(entries[-1].number + 1)]
        self._journal.add([*entries, *gone])
        failed = sum(bool(entry.error) for entry in entries)
        written, kept, before = self.outcome
        self.outcome = Outcome(written + len(entries) - failed, kept, before + failed)
        for entry in entries:
            self._told(entry)

    def _is_done(self, some: Sequence[Item], first: int) -> bool:
        for number, item in enumerate(some, start=first):
            entry = self._journal.known.get(number)
            if entry is None or entry.error or (entry.image, entry.name) != (item.source, item.name):
                return False
            if self._wanted and entry.outputs.keys() != self._wanted.names(item.name, first):
                return False
            whole = all(self._is_whole(*output) for output in entry.outputs.items())
            if not whole or item.digest(self._max_bytes) != entry.sha256:
                return False
        return not self._gone(first + len(some))

    def _is_whole(self, output: str, digest: str) -> bool:
        """Check whether a file is there, as it was written."""
        try:
            with inside(self._journal.path.parent, output).open("rb") as stream:
                return hashlib.file_digest(stream, "sha256").hexdigest() == digest
        except OSError:
            return False

    def _gone(self, number: int) -> list[int]:
        """Return the numbers, from this one to the end of its batch, of images that are not given any more."""
        rest = range(number, -(-number // self._batches.size) * self._batches.size)
        return [number for number in rest if number in self._journal.known]


def run(model: nn.Module, ledger: Ledger, work: Work) -> Outcome:
    """Explain images batch by batch.

    Args:
        model: The model.
        ledger: The images.
        work: Question, files and folders.

    Returns:
        Numbers of images.

    Raises:
        VisattnError: An error that concerns all images, such as a full disk.
    """
    for entries in done(model, ledger.left(), work, ledger.spare):
        ledger.settle(entries)
    return ledger.outcome
