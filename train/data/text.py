"""The text of a run: one corpus, or the domains of a mixture, each as token shards."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from ..config import DataConfig, DomainConfig
from ..errors import UserError
from .corpora import Corpus
from .mixing import content_hash
from .shards import PARTS, Shards, at_hand, prepare
from .split import split_corpus
from .storage import Progress, cache_directory, checksum, silent
from .tokenizers import Tokenizer, load_tokenizer

Text = dict[str, Shards]  # by domain; the domain of a corpus that is no mixture is PLAIN
PLAIN = ""
SOURCE = [item.name for item in fields(DomainConfig) if item.name in {other.name for other in fields(DataConfig)}]
_LINE_SECONDS = 10.0  # between two lines of progress without a terminal; chosen by hand


def domains_of(config: DataConfig) -> dict[str, DataConfig]:
    """Return the config of each domain's text; of a corpus that is no mixture, {PLAIN: config}."""
    if config.corpus != "mixture":
        return {PLAIN: config}
    whole = replace(config, domains=None, target=None, epochs_of=None)
    return {
        name: replace(whole, **{field: getattr(domain, field) for field in SOURCE})
        for name, domain in (config.domains or {}).items()
    }


@contextmanager
def in_domain(name: str) -> Iterator[None]:
    """Make a UserError about a field of `data` name that field of the domain instead."""
    try:
        yield
    except UserError as error:
        if name == PLAIN:
            raise
        named = re.sub(rf"\bdata\.({'|'.join(SOURCE)})\b", rf"data.domains.{name}.\1", str(error))
        raise UserError(named if named != str(error) else f"data.domains.{name}: {error}") from error


def prepare_text(
    config: DataConfig,
    progress: Progress = silent,
    keep: Callable[[Hashable, Callable[[], Shards]], Shards] = lambda key, build: build(),
) -> Text:
    """Return the shards of every domain, built unless the cache has them; all domains share one tokenizer.

    `keep` may return an earlier result for a key instead of building. Raises UserError as `prepare` does.
    """
    domains, corpora, text = domains_of(config), list[Corpus](), Text()
    tokenizer = None
    if config.corpus == "mixture" and config.tokenizer == "bpe":
        for name, domain in domains.items():
            with in_domain(name):
                corpora.append(split_corpus(domain))
        tokenizer = load_tokenizer(config, JoinedCorpus(tuple(corpora)), cache_directory(config), progress)
    for name, domain in domains.items():
        with in_domain(name):
            text[name] = keep(repr(domain), partial(prepare, domain, progress, tokenizer))
    return text


def text_at_hand(config: DataConfig, tokenizer: Tokenizer) -> Text:
    """Return the shards of a checkpoint's text, built if missing. Raises UserError if a Hub corpus has none."""
    text = Text()
    for name, domain in domains_of(config).items():
        with in_domain(name):
            text[name] = at_hand(domain, tokenizer)
    return text


@dataclass(frozen=True)
class JoinedCorpus(Corpus):
    """The corpora of a mixture, to train its tokenizer on: the same number of bytes of each."""

    corpora: tuple[Corpus, ...]

    def documents(self) -> Iterator[str]:
        for corpus in self.corpora:
            yield from corpus.documents()

    def fingerprint(self) -> str:
        return checksum(["joined", *(corpus.fingerprint() for corpus in self.corpora)])[:16]

    def size_bytes(self) -> int | None:
        sizes = [corpus.size_bytes() for corpus in self.corpora]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def sample(self, size: int) -> Iterator[str]:
        for corpus in self.corpora:
            blocks = corpus.held_out()
            for text in corpus.sample(size // len(self.corpora)):
                if blocks is None or content_hash(text.encode()) not in blocks:
                    yield text


def prepare_with_progress(config: DataConfig) -> Text:
    """Run `prepare_text`; print progress and duration."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.text import Text as Line

    class Speed(TextColumn):
        def render(self, task: Any) -> Line:
            speed = task.finished_speed or task.speed
            unit = " tokens" if task.description == "tokenize" else ""
            return Line(f"{speed:,.0f}{unit}/s" if speed else "")

    columns = (TextColumn("{task.description}"), BarColumn(), Speed(""), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks: dict[str, Any] = {}
        started: dict[str, float] = {}
        start = printed_at = time.monotonic()

        def show(stage: str, done: float, total: float) -> None:
            nonlocal printed_at
            now = time.monotonic()
            if stage not in tasks:
                tasks[stage], started[stage] = bar.add_task(stage, total=None), now
            bar.update(tasks[stage], completed=done, total=total or None)
            if not console.is_terminal and now - printed_at > _LINE_SECONDS:
                printed_at = now
                of_total = f" of {total:,.0f}" if total else ""
                print(f"{stage}: {done:,.0f}{of_total} after {now - start:.0f} s", file=sys.stderr, flush=True)

        text = prepare_text(config, show)
    if "tokenize" in started:
        now = time.monotonic()
        tokens = sum(shards.manifest[part]["tokens"] for shards in text.values() for part in PARTS)
        speed = tokens / (now - started["tokenize"])
        print(f"built in {now - start:.1f} s; {speed:,.0f} tokens/s from text to shards", file=sys.stderr)
    return text
