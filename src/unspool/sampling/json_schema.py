"""Preparation of a JSON schema for a grammar: objects are closed, unsupported keywords are removed.

    prepared, notes = prepare_schema({"properties": {"name": {"type": "string"}}})
    prepared    # {"properties": {"name": {"type": "string"}}, "additionalProperties": False}

In JSON Schema an object may have further properties by default, and a small model then adds
properties until it reaches the token limit. Here an object that names properties has no others.
`"additionalProperties": true` opens it; `"x-unspool": {"open_objects": true}` at the root opens
all.

Closing has the meaning of `unevaluatedProperties: false`: the parts of an `allOf` are closed
together, because nothing could satisfy them if each were closed separately. A `$ref` in such a part
is inlined first.

Grammars do not support `not`, `if` or `uniqueItems`. They are removed, so the grammar accepts more
than the schema, and a note names them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]

_UNSUPPORTED = (
    "not", "if", "then", "else", "dependencies", "dependentRequired", "dependentSchemas",
    "uniqueItems", "contains", "minContains", "maxContains", "propertyNames",
    "unevaluatedItems",
)  # fmt: skip
_FORMATS = {"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri",
            "uuid"}  # fmt: skip
_PLAIN_FORMATS = {"int32", "int64", "float", "double", "password"}  # OpenAPI: no constraint
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")  # maps of schemas
# Keywords with a schema or a list of schemas.
_SCHEMA_KEYWORDS = ("items", "prefixItems", "additionalItems", "additionalProperties")
_ALTERNATIVES = ("anyOf", "oneOf")
_MAX_NODES = 20_000  # after references are inlined


class SchemaError(ValueError):
    """A schema cannot be used; the message completes "it ..."."""


def prepare_schema(schema: Any) -> tuple[Any, list[str]]:
    """Return the schema that a grammar can enforce, and notes about the differences."""
    if not isinstance(schema, dict):
        return schema, []
    preparer = _SchemaPreparer(schema)
    prepared = preparer.prepare(schema)
    return prepared, preparer.notes()


class _SchemaPreparer:
    def __init__(self, root: Schema) -> None:
        self.root = root
        self.ids = {node["$id"] for node in _nodes(root) if isinstance(node.get("$id"), str)}
        self.open_objects = _mapping(root, "x-unspool").get("open_objects") is True
        self.unsupported: dict[str, None] = {}
        self.formats: dict[str, None] = {}
        self.has_loose_one_of = False
        self.count = 0
        self.inlining: list[str] = []  # references that are being inlined

    def notes(self) -> list[str]:
        result = []
        if self.unsupported:
            names = ", ".join(f"'{name}'" for name in self.unsupported)
            result.append(f"the JSON schema's {names} is not enforced: check the output")
        if self.formats:
            names = ", ".join(f"{name[:40]!r}" for name in self.formats)
            result.append(f"the JSON schema's format {names} is unknown: any string is accepted")
        if self.has_loose_one_of:
            result.append("the JSON schema's 'oneOf' is treated as 'anyOf': several may match")
        return result

    def prepare(self, node: Any, *, closes: bool = True, enclosing: Iterable[str] = ()) -> Any:
        """Prepare a schema.

        Args:
            closes: whether its object is closed here (it is not part of another schema).
            enclosing: properties that the enclosing schemas name.
        """
        if not isinstance(node, dict):
            return node
        self.count += 1
        if self.count > _MAX_NODES:
            raise SchemaError("is too large after its $refs are inlined")
        self._check_reference(node)
        target = self._target_to_inline(node, closes, enclosing)
        if target is not None:
            return self._inline(node, target, closes, enclosing)
        result = self._prepare_inner(node)
        closes = closes and not self._has_additional_rule(node)
        if isinstance(node.get("allOf"), list):
            result["allOf"] = [self.prepare(inner, closes=False) for inner in node["allOf"]]
        alternatives = [keyword for keyword in _ALTERNATIVES if isinstance(node.get(keyword), list)]
        for keyword in alternatives:
            enclosing_names = [*enclosing, *self._names({**node, keyword: None})] if closes else []
            result[keyword] = [
                self.prepare(inner, closes=closes, enclosing=enclosing_names)
                for inner in node[keyword]
            ]
        if closes and not alternatives and "$ref" not in node and not self.open_objects:
            self._close(result, dict.fromkeys([*self._names(node), *enclosing]))
        return result

    def _close(self, result: Schema, names: Iterable[str]) -> None:
        properties = _mapping(result, "properties")
        if "properties" in result:
            result.setdefault("type", "object")  # naming properties implies an object
        if names or "properties" in result or "patternProperties" in result:
            result["properties"] = properties | {
                name: True for name in names if name not in properties
            }
            result["additionalProperties"] = False

    def _prepare_inner(self, node: Schema) -> Schema:
        """Prepare the inner schemas; remove unsupported keywords."""
        result: Schema = {}
        for keyword, value in node.items():
            if keyword in _UNSUPPORTED:
                if value not in (False, {}, []) or keyword == "not":
                    self.unsupported[keyword] = None
            elif keyword == "unevaluatedProperties":  # closing implements `false`
                if isinstance(value, dict):
                    self.unsupported[keyword] = None
            elif keyword == "format" and not (isinstance(value, str) and value in _FORMATS):
                if isinstance(value, str) and value not in _PLAIN_FORMATS:
                    self.formats[value] = None
            elif keyword in _SCHEMA_MAPS and isinstance(value, dict):
                result[keyword] = {name: self.prepare(inner) for name, inner in value.items()}
            elif keyword in _SCHEMA_KEYWORDS and isinstance(value, list):
                result[keyword] = [self.prepare(inner) for inner in value]
            elif keyword in _SCHEMA_KEYWORDS:
                result[keyword] = self.prepare(value)
            else:
                result[keyword] = value
        for name, inner in _conditional(node).items():
            result["properties"] = {name: self.prepare(inner)} | result.get("properties", {})
        if isinstance(node.get("oneOf"), list) and not self._are_exclusive(node["oneOf"]):
            self.has_loose_one_of = True
        return result

    def _names(self, node: Any, visited: set[str] | None = None) -> list[str]:
        """Properties that a schema and its parts name."""
        visited = set() if visited is None else visited  # references that were followed
        if not isinstance(node, dict):
            return []
        result = [*_mapping(node, "properties"), *_conditional(node)]
        if "properties" in node:
            result += [name for name in _list(node, "required") if isinstance(name, str)]
        reference = node.get("$ref")
        if isinstance(reference, str) and reference not in visited:
            visited.add(reference)
            result += self._names(self._resolve(reference), visited)
        for keyword in ("allOf", *_ALTERNATIVES):
            for inner in _list(node, keyword):
                result += self._names(inner, visited)
        return result

    def _has_additional_rule(self, node: Any, visited: set[str] | None = None) -> bool:
        """Whether the schema specifies additional properties."""
        visited = set() if visited is None else visited
        if not isinstance(node, dict):
            return False
        if "additionalProperties" in node or node.get("unevaluatedProperties", False) is not False:
            return True
        reference = node.get("$ref")
        if isinstance(reference, str) and reference not in visited:
            visited.add(reference)
            target = self._resolve(reference)
            if target is None or self._has_additional_rule(target, visited):
                return True
        return any(self._has_additional_rule(inner, visited) for inner in _list(node, "allOf"))

    def _target_to_inline(
        self, node: Schema, closes: bool, enclosing: Iterable[str]
    ) -> Schema | None:
        """Target of a reference that must be closed together with the enclosing schema."""
        reference = node.get("$ref")
        if not isinstance(reference, str) or reference in self.inlining:
            return None
        is_standalone = closes and not [*enclosing] and not self._names({**node, "$ref": None})
        target = self._resolve(reference)
        if is_standalone or target is None or not self._names(target):
            return None
        return target

    def _inline(self, node: Schema, target: Schema, closes: bool, enclosing: Iterable[str]) -> Any:
        reference = str(node["$ref"])
        inlined = {keyword: value for keyword, value in node.items() if keyword != "$ref"}
        if isinstance(node.get("allOf", []), list):
            inlined["allOf"] = [target, *inlined.get("allOf", [])]
        self.inlining.append(reference)
        try:
            return self.prepare(inlined, closes=closes, enclosing=enclosing)
        finally:
            self.inlining.pop()

    def _resolve(self, reference: str) -> Schema | None:
        """Schema at `#/...`; None if it is not a schema."""
        target = _resolve_pointer(self.root, reference)
        return target if isinstance(target, dict) else None

    def _check_reference(self, node: Schema) -> None:
        reference = node.get("$ref")
        if not isinstance(reference, str) or self.ids:  # with $id, references may be relative to it
            return
        if not reference.startswith("#"):
            raise SchemaError(
                f"refers to {reference[:100]!r}, but remote schemas are not fetched: put it under"
                " $defs and refer to #/$defs/NAME"
            )
        if reference.startswith("#/") and _resolve_pointer(self.root, reference) is None:
            raise SchemaError(f"refers to {reference[:100]!r}, which does not exist")

    def _are_exclusive(self, branches: list[Any]) -> bool:
        """Whether provably no value matches two of the branches."""
        features = [self._branch_features(branch) for branch in branches]
        if any(feature is None for feature in features):
            return False
        return all(
            _differ(feature, other)
            for i, feature in enumerate(features)
            for other in features[i + 1 :]
            if feature is not None and other is not None
        )

    def _branch_features(self, branch: Any) -> tuple[set[str], dict[str, list[Any]]] | None:
        """Types of a branch, and the allowed values of its required properties."""
        if not isinstance(branch, dict):
            return None
        reference = branch.get("$ref")
        if isinstance(reference, str):
            target = self._resolve(reference)
            return None if target is None or "$ref" in target else self._branch_features(target)
        kinds = branch.get("type")
        types = {kinds} if isinstance(kinds, str) else {*map(str, _list(branch, "type"))}
        if "number" in types:
            types.add("integer")
        values = _values(branch)
        if not types and values is not None:
            types = {repr(value) for value in values}
        required = _list(branch, "required")
        fixed_values = {
            name: allowed
            for name, inner in _mapping(branch, "properties").items()
            if name in required and (allowed := _values(inner)) is not None
        }
        return types, fixed_values if values is None else {"": values}


def _differ(
    first: tuple[set[str], dict[str, list[Any]]], other: tuple[set[str], dict[str, list[Any]]]
) -> bool:
    if first[0] and other[0] and not first[0] & other[0]:
        return True
    return any(
        not any(value in other[1][name] for value in values)
        for name, values in first[1].items()
        if name in other[1]
    )


def _values(schema: Any) -> list[Any] | None:
    """Values of `const` or `enum`; None if the schema has neither."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _conditional(node: Schema) -> Mapping[str, Any]:
    """Properties that only a condition names: conditions are not enforced, so allow them."""
    result: dict[str, Any] = {}
    conditions = [node.get("then"), node.get("else")]
    for keyword in ("dependentSchemas", "dependencies"):
        conditions += _mapping(node, keyword).values()
    for condition in conditions:
        if isinstance(condition, dict):
            result |= _mapping(condition, "properties")
    properties = _mapping(node, "properties")
    return {name: inner for name, inner in result.items() if name not in properties}


def _mapping(node: Schema, keyword: str) -> dict[str, Any]:
    value = node.get(keyword)
    return value if isinstance(value, dict) else {}


def _list(node: Schema, keyword: str) -> list[Any]:
    value = node.get(keyword)
    return value if isinstance(value, list) else []


def _resolve_pointer(root: Schema, reference: str) -> Any:
    """Value at a JSON pointer (`#/$defs/name`); None if there is none."""
    head, *parts = unquote(reference).split("/")
    value: Any = root if head == "#" else None
    for part in parts:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            value = value.get(name) if isinstance(value, dict) else None
    return value


def _nodes(value: Any) -> Iterable[Schema]:
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from _nodes(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _nodes(inner)
