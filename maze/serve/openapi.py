"""The OpenAPI description of a service, with the spaces of its policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_STATE = {
    "type": "object",
    "description": "Hidden state of a recurrent policy outside of sessions: that of the answer before.",
    "required": ["bundle", "values"],
    "properties": {
        "bundle": {"type": "string"},
        "values": {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "number"}}},
    },
}
_DECISION = {
    "type": "object",
    "required": ["action", "policy", "bundle", "decision"],
    "properties": {
        "action": {"description": "The action, as the environment takes it."},
        "policy": {"type": "string", "description": "What decided: a policy, or `fallback`."},
        "bundle": {"type": "string", "description": "SHA-256 sum of its bundle."},
        "decision": {"type": "string", "description": "Number under which the decision log has it."},
        "state": _STATE,
        "reason": {"type": "string", "description": "Why the fallback decided."},
        "ranked": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"action": {}, "probability": {"type": "number", "minimum": 0, "maximum": 1}},
            },
        },
    },
}
_ERROR = {
    "type": "object",
    "properties": {
        "error": {"type": "object", "properties": {"code": {"type": "string"}, "message": {"type": "string"}}}
    },
}
_SEED = {"type": "integer", "minimum": 0, "description": "Makes sampled actions reproducible."}
_OPTIONS: Mapping[str, Any] = {
    "agent_id": {"type": "integer", "default": 0},
    "deterministic": {"type": "boolean", "default": True, "description": "False: the action is sampled."},
    "ranked": {"type": "integer", "minimum": 0, "maximum": 100, "description": "So many of the most probable actions."},
}


def open_api(policies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The description.

    :param policies: As :meth:`maze.serve.served.Served.described` gives them.
    """
    paths: dict[str, Any] = {}
    steps: dict[str, list[Mapping[str, Any]]] = {}
    for policy in policies:
        for step in policy["steps"]:
            steps.setdefault(step["step"] if len(policy["steps"]) > 1 else "", []).append(step)
    for name, found in steps.items():
        schemas = [_observation(step) for step in found]
        schema = schemas[0] if all(each == schemas[0] for each in schemas) else {"anyOf": schemas}
        end = f"/{name}" if name else ""
        alone = {**_OPTIONS, "observation": schema, "seed": _SEED, "policy": {"type": "string"}}
        alone["observations"] = {"type": "array", "items": schema, "description": "Instead of one: several decisions."}
        start = {"type": "boolean", "description": "An episode begins: hidden states are zero, whatever is sent."}
        alone |= {"state": _STATE, "episode_start": start}
        each = {"type": "array", "description": "With `observations`: one for each."}
        alone |= {"states": {**each, "items": {"anyOf": [_STATE, {"type": "null"}]}}}
        alone |= {"episode_starts": {**each, "items": start}}
        paths[f"/act{end}"] = {"post": _operation("Decide about an observation by itself.", _object(alone), _DECISION)}
        step_number = {
            "type": "integer",
            "minimum": 0,
            "description": "Number of the decision; the latest is repeated.",
        }
        within = _object({**_OPTIONS, "observation": schema, "step": step_number}, ["observation"])
        operation = _operation("Take the next decision of a session.", within, _DECISION)
        paths[f"/sessions/{{session}}/act{end}"] = {"parameters": [_in_path("session")], "post": operation}
    begin = _object({"seed": _SEED, "policy": {"type": "string"}})
    session = _object(
        {"session": {"type": "string"}, "policy": {"type": "string"}, "bundle": {"type": "string"}, "seed": _SEED}
    )
    named, one = [_in_path("name")], {"parameters": [_in_path("session")]}
    change = _object({"weight": {"type": "number", "minimum": 0}, "shadow": {"type": "boolean"}})
    put = _operation("Swap a policy's bundle (administrators).", None, {"type": "object"})
    put["requestBody"] = {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
    paths |= {
        "/sessions": {"post": _operation("Begin a session.", begin, session, "201")},
        "/sessions/{session}": {**one, "delete": _operation("End a session.", None, {"type": "object"})},
        "/sessions/{session}/reset": {
            **one,
            "post": _operation("Begin another episode.", _object({"seed": _SEED}), session),
        },
        "/policies": {"get": _operation("All policies.", None, {"type": "object"})},
        "/policies/{name}": {
            "parameters": named,
            "get": _operation("A policy's card.", None, {"type": "object"}),
            "put": put,
            "patch": _operation("Change a policy's share (administrators).", change, {"type": "object"}),
            "delete": _operation("Take a policy away (administrators).", None, {"type": "object"}),
        },
        "/health": {"get": _operation("Whether the process is alive.", None, {"type": "object"})},
        "/ready": {"get": _operation("Whether requests are welcome.", None, {"type": "object"})},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Policies", "version": "1", "description": "Decisions of trained policies."},
        "paths": paths,
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{"token": []}, {}],
    }


def _operation(
    summary: str, body: Mapping[str, Any] | None, answer: Mapping[str, Any], status: str = "200"
) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {
            status: {"description": "Done.", "content": {"application/json": {"schema": answer}}},
            "default": {"description": "Refused.", "content": {"application/json": {"schema": _ERROR}}},
        },
    }
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return operation


def _object(properties: Mapping[str, Any], required: Sequence[str] = ()) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": dict(properties), "required": list(required)}


def _in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _observation(step: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of what the raw environment shows."""
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
