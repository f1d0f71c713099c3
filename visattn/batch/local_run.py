"""Run over many images on this machine, and what runs on any machines share: which batches are left, and the journal."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import nn

from visattn._support.untrusted import inside
from visattn.batch.image_sources import Batches
from visattn.batch.image_work import Batch, Work, done
from visattn.batch.items import Item
from visattn.batch.journal import Entry, Journal
from visattn.batch.wanted import Wanted
from visattn.core.pipeline.preprocessing import Preprocessing


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
        how: Preprocessing | None = None,
        wanted: Wanted | None = None,
    ) -> None:
        """Open a ledger.

        Args:
            items: The images.
            journal: Journal of the run, in the output folder.
            batches: Batches that are computed. Which images share a batch does not depend on what was done before.
            told: Function that is called with each entry once it is in the journal.
            how: How images are read.
            wanted: Files that are written for each image; an image for which the journal names others is computed again.
        """
        self.outcome = Outcome(0, 0, 0)
        self.spare = journal.path.with_name(f".{journal.path.name}.files")
        self._items, self._journal, self._batches, self._told = items, journal, batches, told
        self._reading, self._wanted = (how or Preprocessing()).reading, wanted

    def first_kept(self) -> tuple[Item, Entry] | None:
        """Return the first image that an earlier run explained with these settings, and whose results are kept; None if there is none."""
        for first in self._batches.first(len(self._items)):
            some = self._items[first : first + self._batches.size]
            failed = self._failed(some, first)
            if failed is None:
                continue
            for number, item in enumerate(some, start=first):
                if number in self._journal.comparable and number not in failed:
                    return item, self._journal.known[number]
        return None

    def left(self) -> Iterator[Batch]:
        """Yield the batches that must be computed.

        A batch is left out if the journal knows all its images with the same content, and the files of those without an error are there.
        So a run that was interrupted gives the files of one that was not. An image that failed is tried again alone, if it can be read
        now; with its batch, if that has files of its own.
        """
        for first in self._batches.first(len(self._items)):
            some = self._items[first : first + self._batches.size]
            failed = self._failed(some, first)
            again = [number for number in failed or () if self._is_readable(number)]
            if failed is None or (again and self._is_one_result(first)):
                yield self._intended(first, some)
                continue
            yield from (self._intended(number, [self._items[number]]) for number in again)
            for number in range(first, first + len(some)):
                if number not in again:
                    self._keep(self._journal.known[number])

    def _is_one_result(self, first: int) -> bool:
        """Check whether files are written of a batch as a whole."""
        return self._wanted is None or bool(self._wanted.of_batch(first))

    def _intended(self, first: int, some: Sequence[Item]) -> Batch:
        """Return a batch after noting its files in the journal."""
        if self._wanted:
            self._journal.intend(file for item in some for file in self._wanted.names(item.name, first))
        return Batch(first, some)

    def _keep(self, entry: Entry) -> None:
        """Count and tell an entry of an earlier run."""
        failed = bool(entry.error)
        written, kept, before = self.outcome
        self.outcome = Outcome(written, kept + (not failed), before + failed)
        self._told(entry)

    def _is_readable(self, number: int) -> bool:
        try:
            self._items[number].photo(**self._reading)
        except Exception:  # of any library; it was told, and is the reason why the image failed
            return False
        return True

    def settle(self, entries: Sequence[Entry]) -> None:
        """Enter the images of a batch in the journal."""
        gone = [Entry(number, "", "", "", error="not given any more") for number in self._gone(entries[-1].number + 1)]
        self._journal.add([*entries, *gone])
        failed = sum(bool(entry.error) for entry in entries)
        written, kept, before = self.outcome
        self.outcome = Outcome(written + len(entries) - failed, kept, before + failed)
        for entry in entries:
            self._told(entry)

    def _failed(self, some: Sequence[Item], first: int) -> list[int] | None:
        """Return the numbers of the images of a batch that failed, if all others are done; None if there is more to do."""
        known = [self._journal.known.get(number) for number in range(first, first + len(some))]
        failed = [entry.number for entry in known if entry and entry.error]
        settled = all(self._is_done(item, entry, first) for item, entry in zip(some, known, strict=True))
        return failed if settled and not self._gone(first + len(some)) else None

    def _is_done(self, item: Item, entry: Entry | None, first: int) -> bool:
        """Check whether an image has failed, or its results are there and it is as it was."""
        if entry is None or (entry.image, entry.name) != (item.source, item.name):
            return False
        if entry.error:
            return True
        if self._wanted and entry.outputs.keys() != self._wanted.names(item.name, first):
            return False
        whole = all(self._is_whole(*output) for output in entry.outputs.items())
        return whole and item.digest(self._reading["max_bytes"]) == entry.sha256

    def _is_whole(self, output: str, digest: str) -> bool:
        """Check whether a file is there, as it was written."""
        try:
            with inside(self._journal.path.parent, output).open("rb") as stream:
                return hashlib.file_digest(stream, "sha256").hexdigest() == digest
        except OSError:
            return False

    def _gone(self, number: int) -> list[int]:
        """Return the numbers, from this one to the end of its batch, of images that are not given any more."""
        rest = range(max(number, len(self._items)), -(-number // self._batches.size) * self._batches.size)
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
