"""The reader of Hugging Face folders, and their check: headers become a catalog, all else is as for native files."""

from __future__ import annotations

import os
import time

from torch.futures import Future

from holdfast._huggingface.folder import decode_folder, identity_in, read_folder
from holdfast._io import files, posix
from holdfast._native.catalog import Catalog, CatalogBytes
from holdfast._native.reader import CatalogReader
from holdfast._native.verify import Level, VerifyReport, check_level, data_damage, unread
from holdfast.errors import CorruptError, NotFoundError
from holdfast.events.progress import OnBytes
from holdfast.planner import LoadPlan, LoadPlanner

_NO_DIGESTS = "the data, because there are no digests of it (no holdfast.json)"
_ONE_FILE = "the data, because digests are for whole folders, and this is a file"


class HuggingFaceReader(CatalogReader):
    """Reads a Hugging Face folder, a single safetensors file, or the files of an index, at ``path``.

    What lies beside a holdfast.json is verified, unless ``verify=False``; elsewhere there is nothing to verify by, and
    ``unchecked`` says so. ``cast`` lets a target of one floating type take another.
    """

    reads_in_common = True

    def read_bytes(self) -> CatalogBytes:
        return read_folder(self.path)

    def decode(self, data: CatalogBytes) -> Catalog:
        self._identity = identity_in(data)
        return decode_folder(self.path, data)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """As for native files; where no digest tells, the folder is looked at again: another may be in its place."""
        done = super().read_data(plan, planner)
        is_checked = self.verify and self.catalog.has_digests
        if not is_checked and files.identity_of(self.path) != self._identity and self.was_replaced():
            raise CorruptError(f"{self.path!r} was replaced while being read; load it again", path=self.path)
        return done

    @property
    def unchecked(self) -> tuple[str, ...]:
        """What nobody can tell of the folder that was opened."""
        return _unchecked(self.catalog, self.path)

    def was_replaced(self) -> bool:
        """Whether the files are others than those whose headers were read, or are gone."""
        return self._catalog is not None and _is_another(self._catalog, self.path)


def _unchecked(catalog: Catalog, path: str) -> tuple[str, ...]:
    return () if catalog.has_digests else (_NO_DIGESTS if os.path.isdir(path) else _ONE_FILE,)


def _is_another(catalog: Catalog, path: str) -> bool:
    try:
        return decode_folder(path, read_folder(path)).manifest.attempt != catalog.manifest.attempt
    except NotFoundError:
        return True
    except CorruptError:
        return False


def verify_folder(
    path: str | os.PathLike[str], *, level: Level = "digests", sample: float = 1.0, on_progress: OnBytes | None = None
) -> VerifyReport:
    """What a look at the folder or file ``path`` found: at every byte, where there are digests, else at the headers."""
    check_level(level, sample)
    begin = time.perf_counter()
    path = posix.absolute(path)
    while True:
        data = read_folder(path)
        catalog = decode_folder(path, data)
        manifest = catalog.manifest
        damage, read = data_damage(
            catalog,
            already_read=manifest.index.bytes,
            sample=sample if level == "digests" and catalog.has_digests else 0.0,
            on_progress=on_progress,
            checks_headers=False,  # which was done to make a catalog of them
        )
        if not damage or not _is_another(catalog, path):
            break
    return VerifyReport(
        files=len(manifest.files) + bool(manifest.index.name) + catalog.has_digests,
        bytes=max(read, len(data.manifest) + len(data.index)),
        keys=len(manifest.tensors),
        seconds=time.perf_counter() - begin,
        damage=damage,
        unchecked=_unchecked(catalog, path) or tuple(unread(level, sample)),
    )
