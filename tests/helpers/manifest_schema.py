"""JSON schemas for Kubernetes manifests: unknown names are refused, as `kubectl apply
--validate=strict` does."""

from __future__ import annotations

from typing import Any

TEXT, COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
TEXTS = {"type": "object", "additionalProperties": TEXT}


def strict(*required: str, **properties: Any) -> dict[str, Any]:
    """Schema of an object with these properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def list_of(items: dict[str, Any]) -> dict[str, Any]:
    """Schema of a list that is not empty."""
    return {"type": "array", "items": items, "minItems": 1}
