from __future__ import annotations


class ExpertScratch:
    @classmethod
    def for_lines(cls, n, config, weights):
        return cls()


def experts(*a, **k):
    raise NotImplementedError
