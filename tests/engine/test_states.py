"""Recurrent states on the engine: what is kept, what is computed again, what goes first."""

from __future__ import annotations

from hypothesis import settings

from states_machine import StatesMachine

StatesMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestStates = StatesMachine.TestCase
