"""Which replica gets a prompt: the one that holds the longest part of it, unless it is loaded.

A replica keeps what it computed of earlier prompts. A prompt that begins like one of these costs
less there, so a router remembers which beginnings it has sent where. It runs where no model is
loaded, so it has no tokenizer; and it needs none, since prompts whose bytes begin alike have tokens
that begin alike. It cuts the request's own bytes into chunks (`text_hashes`), or tokens into pages
where somebody has them (`page_hashes`), and compares hashes of these.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import blake2b

from unspool.errors import UnspoolError

PAGE = 16  # tokens of a page, as in the engine's cache
CHUNK = 64  # bytes of a chunk: about a page of English text
CAPACITY = 1 << 16  # pages remembered of a replica: about a million tokens
SLACK = 1.0  # how much busier than the average, once more, may be who holds a whole prompt
WARM = 64  # requests after which a replica holds about what the others hold


class NoReplicaError(UnspoolError):
    """There is no replica to choose from."""


def page_hashes(tokens: Sequence[int], page: int = PAGE) -> list[int]:
    """A number of 64 bits for each whole page, made of it and of all pages before it.

    The same in every process and on every machine, unlike Python's own `hash`.
    """
    return _chained(array("q", tokens).tobytes(), page * 8)


def text_hashes(text: str | bytes, chunk: int = CHUNK) -> list[int]:
    """As `page_hashes`, of the text's bytes."""
    return _chained(text.encode("utf-8", "replace") if isinstance(text, str) else text, chunk)


def _chained(data: bytes, size: int) -> list[int]:
    before, hashes = b"", []
    for start in range(0, len(data) - size + 1, size):
        before = blake2b(before + data[start : start + size], digest_size=8).digest()
        hashes.append(int.from_bytes(before, "little"))
    return hashes


def tolerated(slack: float, load: Mapping[str, int], replicas: Collection[str]) -> float:
    """By how many requests in flight a replica that holds a whole prompt may be busier than others:
    `slack` times as many as each has on average, and one. Among idle ones that is a single request,
    among busy ones enough that chance does not send every prompt somewhere else."""
    mean = sum(load.get(replica, 0) for replica in replicas) / max(1, len(replicas))
    return slack * (1 + mean)


def _allowed(replicas: Collection[str], avoid: Collection[str]) -> list[str]:
    if not replicas:
        raise NoReplicaError("there is no replica that could take a request")
    return [replica for replica in replicas if replica not in avoid] or list(replicas)


def session_replica(session: str, replicas: Iterable[str]) -> str:
    """The replica of a session: the same for everyone who knows the same replicas, without having
    to be remembered. When one comes or goes, only its own sessions move (rendezvous hashing)."""

    def weight(replica: str) -> bytes:
        return blake2b(f"{session}\n{replica}".encode("utf-8", "replace"), digest_size=8).digest()

    return max(replicas, key=weight)


class PrefixRouter:
    """Remembers which beginnings of prompts each replica has seen, and chooses by them.

    Each replica costs its requests in flight, less what is `tolerated` times the share of the
    prompt that it holds; the cheapest is chosen. So the longest prefix wins among replicas that are
    about equally busy, a busy replica loses to an idle one, and a few words in common pull nothing
    together.

    A replica that has just come is idle and holds nothing: were it sent all that comes until it is
    as busy as the others, it would have to read all of that at once, whole. So each request that it
    has in flight counts for several at first (slow start).
    """

    def __init__(
        self,
        replicas: Iterable[str] = (),
        *,
        capacity_pages: int = CAPACITY,
        slack: float = SLACK,
    ) -> None:
        self.capacity_pages, self.slack = capacity_pages, slack
        # Of each replica its pages, the one that is forgotten next at the front.
        self._pages: dict[str, OrderedDict[int, None]] = {}
        self._holders: dict[int, set[str]] = {}  # of each page the replicas that hold it
        self._chosen: dict[str, int] = {}  # of each replica, which choice was the last for it
        self._sent: dict[str, int] = {}  # to each replica, how many requests
        self._behind: dict[str, int] = {}  # how many fewer than another, when it came
        self._choices = 0
        for replica in replicas:
            self.add(replica)

    @property
    def replicas(self) -> list[str]:
        return list(self._pages)

    def add(self, replica: str) -> None:
        if replica not in self._pages:
            self._behind[replica] = min(WARM, max(self._sent.values(), default=0))
            self._pages[replica], self._sent[replica] = OrderedDict(), 0

    def remove(self, replica: str) -> None:
        """It is lost or drained: what it held is forgotten."""
        self._chosen.pop(replica, None)
        self._sent.pop(replica, None)
        self._behind.pop(replica, None)
        for page in self._pages.pop(replica, ()):
            self._forget(replica, page)

    def held(self, hashes: Sequence[int]) -> dict[str, int]:
        """How many of these pages, from the first on, each replica holds; none: not named."""
        found: dict[str, int] = {}
        still: set[str] = set(self._pages)
        for count, page in enumerate(hashes, start=1):
            still = still & self._holders.get(page, set())
            if not still:
                break
            found.update(dict.fromkeys(still, count))
        return found

    def choose(
        self, hashes: Sequence[int], load: Mapping[str, int], avoid: Collection[str] = ()
    ) -> str:
        """The replica for this prompt; `load` says how many requests each has in flight, `avoid`
        who is only chosen if there is no other."""
        allowed = _allowed(self._pages, avoid)
        held, worth = self.held(hashes), tolerated(self.slack, load, allowed)

        def cost(replica: str) -> tuple[float, float, int, int]:
            share = held.get(replica, 0) / max(1, len(hashes))
            busy = load.get(replica, 0) * self._weight(replica)
            # Of equals, the one with less in flight, then the one that remembers least, then the
            # one that was not chosen for longest: new prompts spread over all.
            remembers, last = len(self._pages[replica]), self._chosen.get(replica, 0)
            return busy - worth * share, busy, remembers, last

        chosen = min(allowed, key=cost)
        self._choices += 1
        self._chosen[chosen] = self._choices
        self._sent[chosen] += 1
        return chosen

    def _weight(self, replica: str) -> float:
        """For how many a request in flight counts: one, unless the replica has just come."""
        return max(1.0, self._behind[replica] / (1 + self._sent[replica]))

    def record(self, replica: str, hashes: Sequence[int]) -> None:
        """The replica was sent a prompt of these pages, and holds them now."""
        if (pages := self._pages.get(replica)) is None:
            return  # lost meanwhile
        # From the last page to the first: a page's followers are forgotten before it, as the
        # engine's own cache gives back the ends of prompts before their beginnings.
        for page in reversed(hashes[: self.capacity_pages]):
            pages[page] = None
            pages.move_to_end(page)
            self._holders.setdefault(page, set()).add(replica)
        while len(pages) > self.capacity_pages:
            self._forget(replica, pages.popitem(last=False)[0])

    def _forget(self, replica: str, page: int) -> None:
        holders = self._holders[page]
        holders.discard(replica)
        if not holders:
            del self._holders[page]


class RoundRobin:
    """One after the other, whatever they hold: what a prefix router is compared with."""

    def __init__(self, replicas: Iterable[str] = ()) -> None:
        self.replicas = list(replicas)
        self._next = 0

    def add(self, replica: str) -> None:
        if replica not in self.replicas:
            self.replicas.append(replica)

    def remove(self, replica: str) -> None:
        if replica in self.replicas:
            self.replicas.remove(replica)

    def choose(
        self, hashes: Sequence[int], load: Mapping[str, int], avoid: Collection[str] = ()
    ) -> str:
        allowed = _allowed(self.replicas, avoid)
        chosen = allowed[self._next % len(allowed)]
        self._next += 1
        return chosen

    def record(self, replica: str, hashes: Sequence[int]) -> None:
        """Nothing is remembered."""
