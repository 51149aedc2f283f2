"""What a generation is made of: steps, one a token, each with what led to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, make_dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from unspool.errors import count
from unspool.sampling.records import Draw, Pick, StageReport
from unspool.text.tokenizer.characters import readable

_Bytes = bytes  # where `Step.bytes` hides the type

if TYPE_CHECKING:  # a notebook alone needs it
    from unspool.notebook import Piece


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token the model weighed at one place."""

    token: int
    text: str
    logprob: float  # by the model itself
    probability: float  # in the distribution that was drawn from; 0 if a stage removed it


@dataclass(frozen=True, slots=True)
class Step:
    """One token, and how it came to be picked.

    `text` is what could be shown once this token was there: it may hold characters that earlier
    tokens had begun, and is empty while a character or a possible stop string is unfinished. The
    texts of all steps joined are the text of the generation. `bytes` is this token's own share.

    What nobody asked for is None: rank, entropy, probability and draw come with `explain=True` or
    `top`, and `Generation.explained()` gives them afterwards.
    """

    token: int
    bytes: bytes
    text: str
    logprob: float  # of this token, by the model itself, before any sampling stage
    position: int  # where it stands in the whole text, prompt included
    seconds: float = 0.0  # from the step before (or the start) to this token
    finish_reason: str | None = None  # on the last step
    rank: int | None = None  # 0: the likeliest
    entropy: float | None = None  # of the model's distribution, in nats: how unsure it was
    probability: float | None = None  # of this token in the distribution that was drawn from
    draw: Draw | None = None  # the number drawn and the interval it fell in; None if greedy
    candidates: tuple[Candidate, ...] = ()  # the likeliest, as many as asked for
    stages: tuple[StageReport, ...] = ()  # what each sampling stage did, if asked for
    draft: str | None = None  # `accepted` or `rejected`, where a draft had guessed this token
    retracts: int = 0  # how many steps before this one were taken back by a guard
    chosen: bool = False  # by a person, not by the model
    # Whether it is no part of the answer: a thought, or its marks. Follows from the tokens.
    thought: bool = field(default=False, compare=False)
    # In which pass over a canvas it was set. None: written left to right, as all that traces save.
    canvas_pass: int | None = field(default=None, compare=False)
    # Of a character that the tokens before left unfinished: follows from them, and is not saved.
    begun: _Bytes = field(default=b"", compare=False)

    @property
    def piece(self) -> str:
        """This token for people to read: a character that it completes is shown whole, bytes that
        are none stand in ⟨⟩."""
        return readable(self.bytes, self.begun)

    def __repr__(self) -> str:
        rank = "" if self.rank is None else f", rank {self.rank}"
        chance = math.exp(self.logprob)
        return f"<Step {self.piece!r} ({self.token}), p {chance:.3g}{rank}>"

    def as_piece(self) -> Piece:
        """The step for a notebook."""
        from unspool.notebook import Piece, percent

        facts = [f"token {self.token}, probability {percent(math.exp(self.logprob))}"]
        if self.rank is not None and self.entropy is not None:
            facts.append(f"rank {self.rank + 1}, entropy {self.entropy:.2f} nats")
        if self.draw is not None:
            facts.append(f"drew {self.draw.u:.4f} from {self.draw.low:.4f} to {self.draw.high:.4f}")
        if self.chosen:
            facts.append("chosen by a person")
        if self.candidates:
            facts.append("candidates: " + ", ".join(map(_weighed, self.candidates)))
        chance = math.exp(self.logprob)
        # A control token has no text, and half a character none yet.
        shown = self.text or ("" if self.bytes else f"⟨{self.token}⟩")
        return Piece(self.piece, chance, facts, shown)

    def _repr_html_(self) -> str:
        from unspool.notebook import note, picture, text_html

        piece = self.as_piece()
        return picture(
            text_html([replace(piece, shown=None if self.bytes else piece.shown)]),
            *map(note, piece.facts),
        )

    @property
    def explained(self) -> bool:
        """Whether the step tells more than its token and log-probability."""
        return self.rank is not None

    def to_dict(self) -> dict[str, Any]:
        """For JSON; bytes as a list of numbers."""
        told = {**asdict(self), "bytes": list(self.bytes)}
        del told["begun"]  # what the bytes of the steps before say
        if self.canvas_pass is None:
            del told["canvas_pass"]
        if not self.thought:
            del told["thought"]
        return told


_Draft = make_dataclass(
    "_Draft",
    [(f.name, Any) if f.default is MISSING else (f.name, Any, f.default) for f in fields(Step)],
    slots=True,
)


def plain_step(
    token: int, piece: _Bytes, shown: str, logprob: float, position: int, seconds: float,
    finish_reason: str | None, draft: str | None, begun: _Bytes, thought: bool = False,
) -> Step:  # fmt: skip
    """A step of which nobody asked how it was picked.

    This is made for every token of every text: it is filled in first and frozen then, which takes
    a quarter of the time that a frozen dataclass takes to be made.
    """
    step: Any = _Draft(
        token, piece, shown, logprob, position, seconds, finish_reason, draft=draft, begun=begun,
        thought=thought,
    )  # fmt: skip
    step.__class__ = Step
    return cast(Step, step)


def explained_step(
    pick: Pick,
    position: int,
    shown: str,
    token_bytes: Callable[[int], bytes],
    seconds: float,
    finish_reason: str | None,
    draft: str | None = None,
    retracts: int = 0,
    *,
    begun: _Bytes = b"",
    thought: bool = False,
) -> Step:
    """A step with all that sampling knows of a pick."""
    return Step(
        pick.token,
        token_bytes(pick.token),
        shown,
        pick.logprob,
        position,
        seconds,
        finish_reason,
        pick.rank,
        pick.entropy,
        pick.probability,
        pick.draw,
        tuple(
            Candidate(c.token, readable(token_bytes(c.token), begun), c.logprob, c.probability)
            for c in pick.candidates
        ),
        pick.stages,
        draft,
        retracts,
        begun=begun,
        thought=thought,
    )


def _weighed(candidate: Candidate) -> str:
    from unspool.notebook import percent

    return f"{candidate.text!r} {percent(math.exp(candidate.logprob))}"


def brief(text: str, most: int = 48) -> str:
    """A text in quotes on one line, cut if it is long."""
    return repr(text if len(text) <= most else text[: most - 1] + "…")


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens and time that a generation took."""

    prompt_tokens: int
    completion_tokens: int
    first_token_seconds: float
    total_seconds: float
    reused_tokens: int = 0  # of the prompt, computed before and used again
    reasoning_tokens: int = 0  # of the new ones: thoughts and their marks
    reasoning_seconds: float = 0.0

    @property
    def total_tokens(self) -> int:
        """The prompt's and the new ones."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def tokens_per_second(self) -> float:
        """Speed after the first token, which also waits for the prompt."""
        writing = self.total_seconds - self.first_token_seconds
        return (self.completion_tokens - 1) / writing if writing > 0 else 0.0


@dataclass(frozen=True, slots=True)
class TokenScore:
    """How well the model saw one token of a given text coming."""

    token: int
    text: str
    logprob: float | None  # None for a first token with nothing before it
    rank: int | None
    entropy: float | None
    candidates: tuple[Candidate, ...] = ()

    def __repr__(self) -> str:
        told = "" if self.logprob is None else f", p {math.exp(self.logprob):.3g}, rank {self.rank}"
        return f"<TokenScore {self.text!r} ({self.token}){told}>"

    def as_piece(self) -> Piece:
        """The token for a notebook."""
        from unspool.notebook import Piece, percent

        facts, shown = [f"token {self.token}"], self.text or f"⟨{self.token}⟩"
        if self.logprob is None or self.rank is None or self.entropy is None:
            return Piece(self.text, None, [*facts, "nothing before it"], shown)
        facts.append(f"probability {percent(math.exp(self.logprob))}, rank {self.rank + 1}")
        facts.append(f"entropy {self.entropy:.2f} nats")
        if self.candidates:
            facts.append("candidates: " + ", ".join(map(_weighed, self.candidates)))
        return Piece(self.text, math.exp(self.logprob), facts, shown)


@dataclass(frozen=True, slots=True)
class Score:
    """A given text, token by token, as the model judges it."""

    positions: Sequence[TokenScore]

    @property
    def tokens(self) -> list[int]:
        """The text's tokens."""
        return [position.token for position in self.positions]

    @property
    def logprobs(self) -> list[float | None]:
        """Of each token given those before it; None where nothing stands before."""
        return [position.logprob for position in self.positions]

    @property
    def total(self) -> float:
        """Log-probability of the whole text."""
        return math.fsum(self._known)

    def __repr__(self) -> str:
        text = brief("".join(position.text for position in self.positions))
        return f"<Score {text}, {count(len(self.positions), 'token')}, {self.describe()}>"

    def describe(self) -> str:
        """The perplexity in words; of a single token there is none."""
        if not self._known:
            return "nothing to judge: the first token has nothing before it"
        return f"log-probability {self.total:.3f}, perplexity {self.perplexity:.3f}"

    @property
    def perplexity(self) -> float:
        """How many equally likely tokens the model felt it was choosing from, on average; nan where
        nothing was judged: the first token has nothing before it."""
        known = self._known
        return math.exp(-math.fsum(known) / len(known)) if known else math.nan

    def _repr_html_(self) -> str:
        from unspool.notebook import legend, note, picture, steps_table, text_html

        pieces = [position.as_piece() for position in self.positions]
        return picture(text_html(pieces), note(self.describe()), legend(), steps_table(pieces))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        positions = [asdict(position) for position in self.positions]
        perplexity = self.perplexity if self._known else None  # JSON has no nan
        return {"total": self.total, "perplexity": perplexity, "positions": positions}

    @property
    def _known(self) -> list[float]:
        return [logprob for logprob in self.logprobs if logprob is not None]
