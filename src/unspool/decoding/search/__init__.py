"""Test-time search (`lm.think`)."""
