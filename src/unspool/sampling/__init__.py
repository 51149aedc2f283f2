"""Logits to one token: the stages, their chain, the draw, and the scores of given tokens."""

from __future__ import annotations

from unspool.sampling.candidates import BadLogitsError, Candidates, NoCandidateError
from unspool.sampling.chain import (
    Candidate,
    Chain,
    Draw,
    Pick,
    Scores,
    StageReport,
    log_softmax,
    next_state,
    score,
)
from unspool.sampling.draw import uniform
from unspool.sampling.grammar import Grammar, GrammarSpec, GrammarState, GrammarVocabulary
from unspool.sampling.rows import RowInput, Rows, StageState
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
