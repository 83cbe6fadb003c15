"""The OpenAPI description of a server, with the spaces of its policies."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

_OBSERVATION = json.dumps({"$ref": "#/components/schemas/Observation"})
_ACTING = ("/act", "/sessions/{session}/act")
"""Paths that exist once for each sub-step."""


def open_api(policies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Describe the endpoints of a server.

    :param policies: As :meth:`maze.serve.served.Served.described` returns them.
    """
    document: dict[str, Any] = json.loads((resources.files("maze.serve") / "openapi.json").read_bytes())
    acting = {path: json.dumps(document["paths"].pop(path)) for path in _ACTING}
    steps: dict[str, list[dict[str, Any]]] = {}
    for policy in policies:
        for step in policy["steps"]:
            end = f"/{step['step']}" if len(policy["steps"]) > 1 else ""
            steps.setdefault(end, []).append(_observation(step))
    for end, schemas in steps.items():
        schema = schemas[0] if all(each == schemas[0] for each in schemas) else {"anyOf": schemas}
        for path, text in acting.items():
            document["paths"][path + end] = json.loads(text.replace(_OBSERVATION, json.dumps(schema)))
    return document


def _observation(step: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of an observation of the raw environment."""
    entries = {name: _entry(space) for name, space in step["observation"].items()}
    if step["observation_kind"] == "single":
        return next(iter(entries.values()))
    if step["observation_kind"] == "tuple":
        return {"type": "array", "prefixItems": list(entries.values()), "minItems": len(entries)}
    return {"type": "object", "properties": entries, "required": list(entries)}


def _entry(space: Mapping[str, Any]) -> dict[str, Any]:
    dtype = str(space.get("dtype", "float32"))
    schema: dict[str, Any] = {"type": "integer" if "int" in dtype else "boolean" if dtype == "bool" else "number"}
    for size in reversed(space.get("shape", ())):
        schema = {"type": "array", "items": schema, "minItems": size, "maxItems": size}
    return schema
