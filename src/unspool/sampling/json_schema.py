"""A JSON schema made ready for a grammar: objects are closed, and what cannot be kept to is said.

    ready, notes = prepare_schema({"properties": {"name": {"type": "string"}}})
    ready    # {"properties": {"name": {"type": "string"}}, "additionalProperties": False}

JSON Schema lets an object have any further properties unless it says otherwise, and a small model
then adds properties until its tokens run out. Here an object that names properties has no others.
`"additionalProperties": true` opens it, `"x-unspool": {"open_objects": true}` at the root all.

Closing means what `unevaluatedProperties: false` means: the parts of an `allOf` are closed as one,
for if each were closed by itself nothing could fit. A `$ref` in such a part is written out first.

A grammar knows no `not`, no `if`, no `uniqueItems`. They are left out, so that more texts fit than
the schema says, and a note names them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]

_UNKEPT = (
    "not", "if", "then", "else", "dependencies", "dependentRequired", "dependentSchemas",
    "uniqueItems", "contains", "minContains", "maxContains", "propertyNames",
    "unevaluatedItems",
)  # fmt: skip
_FORMATS = {"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri",
            "uuid"}  # fmt: skip
_PLAIN_FORMATS = {"int32", "int64", "float", "double", "password"}  # OpenAPI's: they bind no text
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")  # hold schemas by name
_INSIDE = ("items", "prefixItems", "additionalItems", "additionalProperties")  # schema, or several
_ALTERNATIVES = ("anyOf", "oneOf")
_MOST_NODES = 20_000  # schemas that a schema comes to once its references are written out


class SchemaError(ValueError):
    """A schema that cannot be used; the text completes "it ..."."""


def prepare_schema(schema: Any) -> tuple[Any, list[str]]:
    """The schema as a grammar can keep to it, and what must be said about the difference."""
    if not isinstance(schema, dict):
        return schema, []
    preparer = _Preparer(schema)
    ready = preparer.prepare(schema)
    return ready, preparer.notes()


class _Preparer:
    def __init__(self, root: Schema) -> None:
        self.root = root
        self.ids = {node["$id"] for node in _nodes(root) if isinstance(node.get("$id"), str)}
        self.opens_all = _mapping(root, "x-unspool").get("open_objects") is True
        self.unkept: dict[str, None] = {}
        self.formats: dict[str, None] = {}
        self.loose_one_of = False
        self.count = 0
        self.written_out: list[str] = []  # the references that are being written out

    def notes(self) -> list[str]:
        found = []
        if self.unkept:
            names = ", ".join(f"'{name}'" for name in self.unkept)
            found.append(f"the JSON schema's {names} cannot be kept to: check the answer for it")
        if self.formats:
            names = ", ".join(f"{name[:40]!r}" for name in self.formats)
            found.append(f"the JSON schema's format {names} is not known: any text is taken")
        if self.loose_one_of:
            found.append("the JSON schema's 'oneOf' is read as 'anyOf': a text may fit several")
        return found

    # -- one schema --------------------------------------------------------------------------

    def prepare(self, node: Any, *, closes: bool = True, also: Iterable[str] = ()) -> Any:
        """A schema, ready. `closes`: not a part of another one, so that its object is closed here;
        `also` are properties that are named around it."""
        if not isinstance(node, dict):
            return node
        self.count += 1
        if self.count > _MOST_NODES:
            raise SchemaError("is too large once its $refs are written out")
        self._check_reference(node)
        target = self._target_to_join(node, closes, also)
        if target is not None:
            return self._written_out(node, target, closes, also)
        found = self._with_inner(node)
        closes = closes and not self._says_what_else(node)
        if isinstance(node.get("allOf"), list):
            found["allOf"] = [self.prepare(each, closes=False) for each in node["allOf"]]
        alternatives = [word for word in _ALTERNATIVES if isinstance(node.get(word), list)]
        for word in alternatives:
            around = [*also, *self._names({**node, word: None})] if closes else []
            found[word] = [self.prepare(each, closes=closes, also=around) for each in node[word]]
        if closes and not alternatives and "$ref" not in node and not self.opens_all:
            self._close(found, dict.fromkeys([*self._names(node), *also]))
        return found

    def _close(self, found: Schema, names: Iterable[str]) -> None:
        known = _mapping(found, "properties")
        if "properties" in found:
            found.setdefault("type", "object")  # who names properties means no number or list
        if names or "properties" in found or "patternProperties" in found:
            found["properties"] = known | {name: True for name in names if name not in known}
            found["additionalProperties"] = False

    def _with_inner(self, node: Schema) -> Schema:
        """The schemas inside it ready, what a grammar does not know left out."""
        found: Schema = {}
        for word, value in node.items():
            if word in _UNKEPT:
                if value not in (False, {}, []) or word == "not":
                    self.unkept[word] = None
            elif word == "unevaluatedProperties":  # closing does what its `false` asks for
                if isinstance(value, dict):
                    self.unkept[word] = None
            elif word == "format" and not (isinstance(value, str) and value in _FORMATS):
                if isinstance(value, str) and value not in _PLAIN_FORMATS:
                    self.formats[value] = None
            elif word in _BY_NAME and isinstance(value, dict):
                found[word] = {name: self.prepare(each) for name, each in value.items()}
            elif word in _INSIDE and isinstance(value, list):
                found[word] = [self.prepare(each) for each in value]
            elif word in _INSIDE:
                found[word] = self.prepare(value)
            else:
                found[word] = value
        for name, each in _conditional(node).items():
            found["properties"] = {name: self.prepare(each)} | found.get("properties", {})
        if isinstance(node.get("oneOf"), list) and not self._exclude_each_other(node["oneOf"]):
            self.loose_one_of = True
        return found

    # -- properties and references -----------------------------------------------------------

    def _names(self, node: Any, seen: set[str] | None = None) -> list[str]:
        """The properties that a schema and those it is made of speak of."""
        seen = set() if seen is None else seen  # references, each followed once
        if not isinstance(node, dict):
            return []
        found = [*_mapping(node, "properties"), *_conditional(node)]
        if "properties" in node:
            found += [name for name in _several(node, "required") if isinstance(name, str)]
        reference = node.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            found += self._names(self._resolved(reference), seen)
        for word in ("allOf", *_ALTERNATIVES):
            for each in _several(node, word):
                found += self._names(each, seen)
        return found

    def _says_what_else(self, node: Any, seen: set[str] | None = None) -> bool:
        """Whether it says itself which further properties there may be."""
        seen = set() if seen is None else seen
        if not isinstance(node, dict):
            return False
        if "additionalProperties" in node or node.get("unevaluatedProperties", False) is not False:
            return True
        reference = node.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            target = self._resolved(reference)
            if target is None or self._says_what_else(target, seen):
                return True
        return any(self._says_what_else(each, seen) for each in _several(node, "allOf"))

    def _target_to_join(self, node: Schema, closes: bool, also: Iterable[str]) -> Schema | None:
        """What a reference leads to, where that must be closed together with what is around it."""
        reference = node.get("$ref")
        if not isinstance(reference, str) or reference in self.written_out:
            return None
        stands_alone = closes and not [*also] and not self._names({**node, "$ref": None})
        target = self._resolved(reference)
        if stands_alone or target is None or not self._names(target):
            return None
        return target

    def _written_out(self, node: Schema, target: Schema, closes: bool, also: Iterable[str]) -> Any:
        reference = str(node["$ref"])
        rest = {word: value for word, value in node.items() if word != "$ref"}
        if isinstance(node.get("allOf", []), list):
            rest["allOf"] = [target, *rest.get("allOf", [])]
        self.written_out.append(reference)
        try:
            return self.prepare(rest, closes=closes, also=also)
        finally:
            self.written_out.pop()

    def _resolved(self, reference: str) -> Schema | None:
        """The schema that `#/...` means; None where it is something else."""
        found = _at(self.root, reference)
        return found if isinstance(found, dict) else None

    def _check_reference(self, node: Schema) -> None:
        reference = node.get("$ref")
        if not isinstance(reference, str) or self.ids:  # with ids, names may mean anything
            return
        if not reference.startswith("#"):
            raise SchemaError(
                f"refers to {reference[:100]!r}, and nothing is fetched from elsewhere: put that"
                " schema under $defs and write #/$defs/NAME"
            )
        if reference.startswith("#/") and _at(self.root, reference) is None:
            raise SchemaError(f"refers to {reference[:100]!r}, which is not in it")

    def _exclude_each_other(self, branches: list[Any]) -> bool:
        """Whether no value can fit two of them, as far as that is easily seen."""
        told = [self._told_apart_by(branch) for branch in branches]
        if any(each is None for each in told):
            return False
        return all(
            _differ(one, other)
            for i, one in enumerate(told)
            for other in told[i + 1 :]
            if one is not None and other is not None
        )

    def _told_apart_by(self, branch: Any) -> tuple[set[str], dict[str, list[Any]]] | None:
        """The types of a branch, and the values of its properties that are always there."""
        if not isinstance(branch, dict):
            return None
        reference = branch.get("$ref")
        if isinstance(reference, str):
            target = self._resolved(reference)
            return None if target is None or "$ref" in target else self._told_apart_by(target)
        kinds = branch.get("type")
        types = {kinds} if isinstance(kinds, str) else {*map(str, _several(branch, "type"))}
        if "number" in types:
            types.add("integer")
        values = _values(branch)
        if not types and values is not None:
            types = {repr(value) for value in values}
        required = _several(branch, "required")
        fixed = {
            name: allowed
            for name, each in _mapping(branch, "properties").items()
            if name in required and (allowed := _values(each)) is not None
        }
        return types, fixed if values is None else {"": values}


def _differ(
    one: tuple[set[str], dict[str, list[Any]]], other: tuple[set[str], dict[str, list[Any]]]
) -> bool:
    if one[0] and other[0] and not one[0] & other[0]:
        return True
    return any(
        not any(value in other[1][name] for value in values)
        for name, values in one[1].items()
        if name in other[1]
    )


def _values(schema: Any) -> list[Any] | None:
    """The values that a schema lists, if it does."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _conditional(node: Schema) -> Mapping[str, Any]:
    """Properties that only a condition speaks of: it is not kept to, they must be allowed."""
    found: dict[str, Any] = {}
    conditions = [node.get("then"), node.get("else")]
    for word in ("dependentSchemas", "dependencies"):
        conditions += _mapping(node, word).values()
    for condition in conditions:
        if isinstance(condition, dict):
            found |= _mapping(condition, "properties")
    return {name: each for name, each in found.items() if name not in _mapping(node, "properties")}


def _mapping(node: Schema, word: str) -> dict[str, Any]:
    value = node.get(word)
    return value if isinstance(value, dict) else {}


def _several(node: Schema, word: str) -> list[Any]:
    value = node.get(word)
    return value if isinstance(value, list) else []


def _at(root: Schema, reference: str) -> Any:
    """What stands at a JSON pointer (`#/$defs/name`); None where nothing does."""
    head, *parts = unquote(reference).split("/")
    found: Any = root if head == "#" else None
    for part in parts:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found


def _nodes(value: Any) -> Iterable[Schema]:
    if isinstance(value, dict):
        yield value
        for each in value.values():
            yield from _nodes(each)
    elif isinstance(value, list):
        for each in value:
            yield from _nodes(each)
