"""Names of models, for the shell to complete. Where no name fits, it completes paths."""

from __future__ import annotations


def model_names(incomplete: str) -> list[str]:
    """Short names, and what is on this machine."""
    from unspool.model.hub.stores import cached_repos, stored_models
    from unspool.model.shipped import shipped_models

    here = list(shipped_models())
    here += [name for repo in cached_repos() for name, _ in repo.models()]
    here += [model.name for model in stored_models() if not model.problem]
    return fetchable_names(incomplete) + _begun(here, incomplete)


def fetchable_names(incomplete: str) -> list[str]:
    """Short names only."""
    from unspool.model.hub.catalogue import catalogue

    return _begun(list(catalogue()), incomplete)


def _begun(names: list[str], incomplete: str) -> list[str]:
    return [name for name in names if name.lower().startswith(incomplete.lower())]
