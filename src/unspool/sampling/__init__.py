"""Logits to one token: the stages, their chain, the draw, and the scores of given tokens."""

from __future__ import annotations

from unspool.sampling.candidates import Candidates
from unspool.sampling.chain import Chain, next_state
from unspool.sampling.draw import uniform
from unspool.sampling.faults import BadLogitsError, NoCandidateError
from unspool.sampling.grammar import Grammar, GrammarState, GrammarVocabulary
from unspool.sampling.grammar_spec import GrammarSpec
from unspool.sampling.records import Candidate, Draw, Pick, StageReport
from unspool.sampling.rows import RowInput, Rows, StageState
from unspool.sampling.scoring import Scores, log_softmax, score
from unspool.sampling.settings import DEFAULT_STAGES, SamplingSettings
from unspool.sampling.stages import STAGES, Stage

__all__ = [
    "DEFAULT_STAGES",
    "STAGES",
    "BadLogitsError",
    "Candidate",
    "Candidates",
    "Chain",
    "Draw",
    "Grammar",
    "GrammarSpec",
    "GrammarState",
    "GrammarVocabulary",
    "NoCandidateError",
    "Pick",
    "RowInput",
    "Rows",
    "SamplingSettings",
    "Scores",
    "Stage",
    "StageReport",
    "StageState",
    "log_softmax",
    "next_state",
    "score",
    "uniform",
]
