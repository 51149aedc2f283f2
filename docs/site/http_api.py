"""The HTTP API as Markdown, from the OpenAPI document. No server is started, no model loaded."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from typing import Any

from docstrings import class_node, code, comment_of, escape, own_bases, table
from options_page import option_help
from pydantic import BaseModel

# The order of the groups, and what each is for.
GROUPS = {
    "OpenAI": "The OpenAI-compatible API: chat completions, completions, responses, embeddings "
    "and models. Point an OpenAI client at `http://127.0.0.1:8000/v1`.",
    "Anthropic": "The messages API of Anthropic. Point a client at `http://127.0.0.1:8000`.",
    "Ollama": "The API of Ollama, for its clients.",
    "llama.cpp": "Endpoints of llama.cpp's server.",
    "KoboldAI": "Endpoints of KoboldAI as KoboldCpp serves them.",
    "The tree of tokens": "Branches of a text that can be rewound, forked, edited and inspected at "
    "any token.",
    "Models to download": "Recommended models, and their downloads with progress.",
    "Thinking": "Test-time search.",
    "Diffusion": "Texts of diffusion models.",
    "Text and tokens": "Tokenizer, chat template, and logprobs of a given prompt.",
    "Training": "Training runs of this machine.",
    "Puzzles": "Puzzles and the models that solve them.",
    "Costs": "Measurements of autoregressive decoding.",
    "Operation": "Health checks and metrics.",
}
STATUSES = [
    ["400", "`invalid_request_error`", "The request is wrong: `message` says what, `param` where."],
    ["401", "`authentication_error`", "The API key is missing or wrong. Send it as "
     "`Authorization: Bearer KEY` (or `x-api-key`)."],
    ["403", "`permission_error`", "Not allowed for this client, such as another origin."],
    ["404", "`not_found_error`", "No such model, branch, response or path. `GET /v1/models` "
     "lists the models."],
    ["413", "`request_too_large`", "The body is larger than `--max-body`."],
    ["429", "`rate_limit_error`", "Too many requests wait. Try again after `retry-after` seconds."],
    ["500", "`server_error`", "A bug in the server; its log has the details."],
    ["503", "`overloaded_error`", "No capacity, or the server is shutting down. Try again after "
     "`retry-after` seconds."],
    ["504", "`timeout_error`", "The text took longer than `--deadline`."],
]  # fmt: skip
# Fields that several requests share and whose classes say nothing more.
FIELDS = {
    "model": "Name of the model. Default: the first one of the server.",
    "stream": "Send the answer as server-sent events while it is generated.",
    "stream_options": "What the stream contains besides the text.",
    "messages": "The conversation.",
    "prompt": "The prompt: text, or token ids.",
    "tools": "Functions that the model may call (tool calling).",
    "tool_choice": "Whether a tool may or must be called, and which.",
    "parallel_tool_calls": "Whether one answer may contain several tool calls.",
    "tool_calls": "Tool calls of the assistant.",
    "n": "Number of answers.",
    "logprobs": "Return the logprobs of the generated tokens.",
    "top_logprobs": "Number of candidate tokens with their logprobs at each position.",
    "response_format": "Structured output: a JSON object, or JSON of a schema.",
    "unspool": "Unspool-specific fields.",
    "dry_sequence_breakers": "Strings that end a repetition for DRY.",
    "cache_control": "Accepted for compatibility: prefixes are always cached.",
    "dimensions": "Number of dimensions of the embedding.",
    "role": "Who wrote the message.",
    "content": "The text of the message.",
    "text": "The text.",
    "name": "The name.",
    "description": "What it does, for the model.",
    "parameters": "JSON schema of the arguments.",
    "input_schema": "JSON schema of the arguments.",
    "schema": "The JSON schema.",
    "strict": "Whether the arguments must fit the schema.",
    "arguments": "The arguments, as JSON text.",
    "function": "The function.",
    "id": "The identifier.",
    "call_id": "The identifier of the tool call.",
    "tool_call_id": "The identifier of the tool call that this message answers.",
    "status": "The state of the item.",
    "type": "The kind of object.",
    "options": "Sampling settings.",
    "metadata": "Your own keys and values; returned unchanged.",
    "system": "The system message.",
    "images": "Not supported: the models are text-only.",
    "format": "Structured output: `json`, or a JSON schema.",
    "keep_alive": "How long the model stays in memory after the request.",
    "think": "Whether a reasoning model reasons first, or its effort.",
    "user": "Accepted for compatibility.",
    "tokens": "Token ids.",
    "at": "Position of a step.",
    "branch": "Identifier of the branch.",
    "identity": "Identifier of the branch.",
    "response_id": "Identifier of the response.",
    "session_id": "Identifier of the session.",
    "slot": "Number of the slot.",
    "return_tokens": "Also return the token ids.",
    "response_fields": "Return only these fields.",
    "since": "Send only events after this number.",
    "thinking": "Whether the model reasons first, and its token budget.",
    "output_config": "Structured output and effort.",
    "first": "Index of the first step.",
    "last": "Index after the last step.",
    "tool_use_id": "The identifier of the tool call that this block answers.",
    "tool_name": "The name of the tool that this message answers.",
    "stop_sequences": "Strings that end the text; they are not part of it.",
    "max_completion_tokens": "Maximum number of new tokens, reasoning included.",
    "max_output_tokens": "Maximum number of new tokens, reasoning included.",
    "input": "The input: text, token ids, or a list.",
    "input_prefix": "The text before the gap.",
    "input_suffix": "The text after the gap.",
    "input_extra": "Other files of the project, as context.",
    "instructions": "The system message.",
    "echo": "Return the prompt too, with its logprobs if they are requested.",
    "best_of": "Generate this many texts and return the most likely.",
    "reasoning": "Reasoning: its effort, or its text.",
    "reasoning_content": "The reasoning of an earlier answer.",
    "effort": "Reasoning effort: low, medium or high.",
    "budget_tokens": "Maximum number of reasoning tokens.",
    "previous_response_id": "Continue this stored response.",
    "previous_message_id": "Continue the thread that ends with this message.",
    "prediction": "Text that the answer probably repeats: used as a draft.",
    "prompt_cache_key": "Accepted for compatibility: prefixes are always cached.",
    "prompt_cache_retention": "Accepted for compatibility: prefixes are always cached.",
    "service_tier": "Accepted for compatibility.",
    "safety_identifier": "Accepted for compatibility.",
    "encoding_format": "How vectors are sent: numbers, or base64.",
    "is_error": "Whether the tool failed.",
    "include_usage": "Whether the last event has the token counts.",
    "changes": "The parts to replace, and their new text.",
    "order": "Which positions are filled first, or the order of a list.",
    "limit": "Maximum number of items.",
    "after": "List the items after this one.",
    "continue_final_message": "Continue the last message instead of answering it.",
    "add_generation_prompt": "Whether the prompt ends with the start of the answer.",
    "chat_template_kwargs": "Variables for the chat template.",
    "last-event-id": "Resume the stream after this event.",
    "puzzle": "The kind of puzzle.",
    "token": "A token id.",
    "top": "Number of candidate tokens.",
    "candidates": "Number of candidates.",
    "against": "Compare with this token.",
    "output": "The result of the tool.",
    "verbose": "Return more details.",
    "truncate": "Cut inputs that are longer than the context.",
}


@cache
def document() -> dict[str, Any]:
    """Return the OpenAPI document of a server with all its routes."""
    from unspool.server.app import create_app
    from unspool.server.http.settings import ServerSettings
    from unspool.server.runtime.registry import ModelEntry, ModelRegistry

    def never_loaded() -> Any:
        raise NotImplementedError

    registry = ModelRegistry([ModelEntry("model", never_loaded, 0)], model_memory=1)
    app, _ = create_app(ServerSettings(), registry)
    api: Any = app
    openapi: dict[str, Any] = api.app.openapi()
    return openapi


def operations() -> list[tuple[str, str, dict[str, Any]]]:
    """Return (method, path, operation) of every endpoint, in the order of the groups."""
    endpoints = [
        (method.upper(), path, operation)
        for path, methods in document()["paths"].items()
        for method, operation in methods.items()
    ]
    order = list(GROUPS)
    return sorted(endpoints, key=lambda item: order.index(item[2]["tags"][0]))


@cache
def _comments() -> dict[str, dict[str, str]]:
    """Return what comments in the source say about the fields of request classes."""
    by_class: dict[str, dict[str, str]] = {}
    kinds = list(BaseModel.__subclasses__())
    for kind in kinds:  # grows in the loop
        kinds += kind.__subclasses__()
        if not kind.__module__.startswith("unspool."):
            continue
        if getattr(sys.modules[kind.__module__], kind.__name__, None) is not kind:
            continue  # made at run time, without source
        texts: dict[str, str] = {}
        for base in own_bases(kind):
            node, lines = class_node(base)
            for item in node.body:
                if isinstance(item, ast.AnnAssign):
                    texts.setdefault(ast.unparse(item.target), comment_of(item, lines))
        by_class[kind.__name__] = texts
    return by_class


def type_name(schema: dict[str, Any]) -> str:
    """Return the type of a schema in short form, with links to the types of the page."""
    if reference := schema.get("$ref"):
        name = reference.rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "const" in schema:
        return code(repr(schema["const"]))
    if "enum" in schema:
        return " or ".join(code(repr(value)) for value in schema["enum"])
    if options := schema.get("anyOf") or schema.get("oneOf"):
        names = [type_name(option) for option in options if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(names))
    if "allOf" in schema:
        return " and ".join(map(type_name, schema["allOf"]))
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {type_name(schema.get('items', {}))}"
    return str(kind)


def _limits(schema: dict[str, Any]) -> str:
    """Return the bounds of a field; those of a 32-bit number say nothing."""
    for option in (schema, *schema.get("anyOf", ())):
        words = []
        for key, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"),
                          ("exclusiveMaximum", "<")):  # fmt: skip
            if key in option and abs(option[key]) < 1e9:
                words.append(f"{sign} {option[key]:g}")
        words += [f"≤ {option['maxLength']:,} characters"] if "maxLength" in option else []
        words += [f"≤ {option['maxItems']:,} items"] if "maxItems" in option else []
        if words:
            return ", ".join(words)
    return ""


def _fields(name: str, schema: dict[str, Any]) -> str:
    required = set(schema.get("required", ()))
    helps, comments = option_help(), _comments().get(name, {})
    rows = []
    for field, value in schema.get("properties", {}).items():
        text = value.get("description") or comments.get(field, "")
        default = value.get("default")
        if not text and (text := FIELDS.get(field, "")) == "" and field in helps:
            text = re.sub(r"^\.\.\. ", "constrain the text ", helps[field][0])
        text = text[:1].upper() + text[1:]
        limits = _limits(value)
        rows.append([
            code(field),
            type_name(value) + (f" ({limits})" if limits else ""),
            "required" if field in required else code("" if default is None else str(default)),
            escape(text),
        ])  # fmt: skip
    return table(["Field", "Type", "Default", "What it does"], rows) if rows else ""


def _used_types(schema: Any) -> set[str]:
    """Return the names of all types that a schema refers to, directly or not."""
    names: set[str] = set()
    pending = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            name = str(value.get("$ref", "")).rpartition("/")[2]
            if name and name not in names:
                names.add(name)
                pending.append(document()["components"]["schemas"][name])
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)
    return names


def _operation(method: str, path: str, operation: dict[str, Any]) -> list[str]:
    anchor = re.sub(r"[^a-z0-9]+", "-", f"{method} {path}".lower()).strip("-")
    parts = [f"### `{method} {path}` {{ #{anchor} }}", f"{operation.get('summary', '')}."]
    parts.append(escape(" ".join(operation.get("description", "").split())))
    rows = []
    for item in operation.get("parameters", ()):
        schema = item.get("schema", {})
        default = schema.get("default")
        rows.append([
            code(item["name"]),
            item["in"],
            type_name(schema),
            "required" if item.get("required") else code("" if default is None else str(default)),
            escape(
                item.get("description", "")
                or schema.get("description", "")
                or FIELDS.get(item["name"], "")
            ),
        ])  # fmt: skip
    if rows:
        parts.append(table(["Parameter", "In", "Type", "Default", "What it is"], rows))
    if body := operation.get("requestBody"):
        schema = next(iter(body["content"].values()))["schema"]
        parts.append(f"Request body: {type_name(schema)}.")
    return parts


def http_page() -> str:
    """Return the page with every endpoint, its fields and errors."""
    schemas = document()["components"]["schemas"]
    endpoints = operations()
    rows = []
    for method, path, operation in endpoints:
        anchor = re.sub(r"[^a-z0-9]+", "-", f"{method} {path}".lower()).strip("-")
        summary = operation.get("summary", "")
        rows.append([f"[`{method} {path}`](#{anchor})", operation["tags"][0], escape(summary)])
    parts = [
        "# HTTP API reference",
        "This page lists every endpoint of `unspool serve`, the OpenAI-compatible server: "
        "methods, paths, request fields, types and errors. It is generated from the OpenAPI "
        "document, which a running server has at `/openapi.json`.",
        "Fields that a request leaves out, or sets to `null`, have their default. Unknown fields "
        "are an error that names them.",
        table(["Endpoint", "API", "What it does"], rows),
        "## Errors",
        "An error has an HTTP status and a JSON body in the format of the API that the client "
        'uses. OpenAI: `{"error": {"message", "type", "param", "code"}}`. Anthropic: '
        '`{"type": "error", "error": {"type", "message"}}`. Ollama: `{"error": message}`.',
        table(["Status", "Type", "Meaning and fix"], STATUSES),
        "A prompt that is longer than the context has status 400 and the code "
        "`context_length_exceeded`. A field that the server does not support has the code "
        "`unsupported_value`, an unknown field `unknown_parameter`.",
    ]
    group = ""
    used: set[str] = set()
    for method, path, operation in endpoints:
        if operation["tags"][0] != group:
            group = operation["tags"][0]
            parts += [f"## {group}", GROUPS[group]]
        parts += _operation(method, path, operation)
        used |= _used_types([operation.get("requestBody"), operation.get("parameters")])
    parts += ["## Types", "Objects that requests contain."]
    for name in sorted(used):
        parts.append(f"### `{name}` {{ #{name.lower()} }}")
        parts.append(escape(" ".join(schemas[name].get("description", "").split())))
        parts.append(_fields(name, schemas[name]) or f"Type: {type_name(schemas[name])}.")
    return "\n\n".join(part for part in parts if part) + "\n"
