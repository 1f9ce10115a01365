"""A dataset of the Hugging Face Hub, streamed: nothing is downloaded beyond `max_bytes` of text."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import UserError
from .readers import cut, listed, one_line, refuse_empty, text_value
from .storage import checksum

_TIMEOUT_SECONDS = 20.0


@dataclass(frozen=True)
class HubDataset:
    """`max_bytes` of text from the head of one split of a dataset on the Hub, or of a folder that `datasets` loads."""

    name: str
    subset: str | None
    split: str
    revision: str | None
    field: str
    max_bytes: int

    def documents(self) -> Iterator[str]:
        return self._head(self.max_bytes)

    def sample(self, size: int) -> Iterator[str]:
        """The head of the stream: a wider sample would download the corpus twice."""
        return self._head(min(size, self.max_bytes))

    def fingerprint(self) -> str:
        return checksum({"kind": "hf", **asdict(self)})[:16]

    def size_bytes(self) -> int | None:
        return self.max_bytes

    def _head(self, size: int) -> Iterator[str]:
        complaint = f"data.name is {self.name!r}; its {self.split} has no text in the field {self.field!r}"
        return refuse_empty(cut((text for text in self._texts() if text.strip()), size), complaint)

    def _texts(self) -> Iterator[str]:
        rows = iter(self._open())
        number = 0
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            # What a remote file can raise is open-ended: network, decoding, schema. All of it ends this stream.
            except Exception as error:
                raise UserError(
                    f"data.name is {self.name!r}; the stream broke after {number} rows ({one_line(error)}), run again"
                ) from error
            number += 1
            if self.field not in row:
                raise UserError(f"data.field is {self.field!r}; {self.name} has {listed(list(row))}")
            yield text_value(row[self.field], self.field, f"row {number} of {self.name}")

    def _open(self) -> Any:
        self._ask_hub()
        import datasets

        try:
            return datasets.load_dataset(
                self.name, self.subset, split=self.split, revision=self.revision, streaming=True
            )
        except ValueError as error:  # an unknown subset or split, which the message lists
            raise UserError(
                f"data.subset is {self.subset!r} and data.split is {self.split!r}; "
                f"{self.name} has others ({one_line(error)})"
            ) from error
        except Exception as error:  # network and Hub errors have no common base class across versions
            raise UserError(f"data.name is {self.name!r}; it cannot be opened ({one_line(error)})") from error

    def _ask_hub(self) -> None:
        if os.path.isdir(self.name):
            return
        import huggingface_hub
        from huggingface_hub import errors

        try:
            huggingface_hub.HfApi().dataset_info(self.name, revision=self.revision, timeout=_TIMEOUT_SECONDS)
        except errors.OfflineModeIsEnabled:
            return  # the user says so; `datasets` may have it in its own cache
        except errors.GatedRepoError:
            raise UserError(
                f"data.name is {self.name!r}; it is gated, accept its terms on the Hub and log in with `hf auth login`"
            ) from None
        except errors.RevisionNotFoundError:
            raise UserError(
                f"data.revision is {self.revision!r}; {self.name} has no such branch, tag or commit"
            ) from None
        except (errors.RepositoryNotFoundError, errors.HFValidationError):
            raise UserError(
                f"data.name is {self.name!r}; the Hub has no such dataset, or it is private and you are not logged in"
            ) from None
        except Exception as error:
            raise UserError(
                f"data.name is {self.name!r}; the Hub cannot be reached ({one_line(error)}), "
                "use data.corpus=stdlib, or text with a local data.path"
            ) from None
