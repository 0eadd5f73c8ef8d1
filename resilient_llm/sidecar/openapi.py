"""What the sidecar answers, as an OpenAPI 3.1 document: the paths for callers, and those for operators.

Of requests that are proxied it says only what the sidecar itself looks at; the rest, and what a reply has in it, is the
provider's API.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import version
from typing import Any, Final, TypeAlias

__all__ = ["OPENAPI", "description"]

JSONObject: TypeAlias = dict[str, Any]
Answers: TypeAlias = dict[int | str, JSONObject]

OPENAPI: Final = "/openapi.json"
"""Where the admin listener has it."""

_PROXIED: Final = {
    "/v1/chat/completions": ("OpenAI", "Chat completions."),
    "/v1/completions": ("OpenAI", "Completions."),
    "/v1/embeddings": ("OpenAI", "Embeddings."),
    "/v1/responses": ("OpenAI", "Responses."),
    "/v1/messages": ("Anthropic", "Messages."),
    "/v1/messages/count_tokens": ("Anthropic", "How many tokens a message has."),
}
_REFUSALS: Final = {
    400: "It is no request.",
    401: "No key, an unknown one, or several.",
    403: "A page in a browser, of an origin that is not allowed, or by a name that is not this machine's.",
    404: "The model is not there, or not for this tenant.",
    408: "The body came too slowly.",
    413: "The body is too large.",
    415: "The body is encoded in a way that is not known.",
    429: "A limit of the tenant, or the provider's.",
    431: "The head is too large.",
    502: "No answer of the provider, or one that cannot be passed on.",
    503: "No target can take it now.",
    504: "The deadline has passed.",
}
_NAME: Final = {"type": "string", "minLength": 1, "pattern": "^[A-Za-z0-9_-]+$"}
_TEXT: Final = {"text/plain": {"schema": {"type": "string"}}}


@lru_cache
def description() -> JSONObject:
    """Give the document."""
    paths: JSONObject = {path: {"post": _proxied(*about)} for path, about in _PROXIED.items()}
    paths["/v1/models"] = {"get": _models("The models that this tenant may ask for.", "Models")}
    paths["/v1/models/{model}"] = {
        "get": _models("One of them.", "ModelOrModels") | {"parameters": [_in_path("model")]}
    }
    for path, about, words in (
        ("/healthz", "Whether it runs.", {200: "It runs."}),
        ("/readyz", "Whether it takes requests.", {200: "It does.", 503: "It is draining."}),
    ):
        paths[path] = {
            "get": _operation("probes", about, {code: _text(word) for code, word in words.items()})
        }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "resilient-llm sidecar",
            "version": version("resilient-llm"),
            "description": "Probes are on both listeners, callers on the main one, operators on the admin one.",
        },
        "paths": paths | _for_operators(),
        "components": {
            "schemas": _SCHEMAS,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                "api-key": {"type": "apiKey", "in": "header", "name": "api-key"},
            },
        },
    }


def _for_operators() -> JSONObject:
    change: Answers = {
        400: _json("The body is no JSON object.", "Refused"),
        404: _either("There is none such.", "Refused"),
    }
    unfit: Answers = {422: _json("What it says cannot be.", "Refused")}
    names = _json("What it is called where that was done.", "Done")
    target, canary = _in_path("target"), _in_path("canary")
    operations: JSONObject = {
        "/metrics": _admin(
            "get", "Metrics, for Prometheus.", {200: _text("They are."), 404: _text("They are off.")}
        ),
        "/admin/health": _admin(
            "get", "Targets, bulkheads, the last reload.", {200: _json("So it is.", "Health")}
        ),
        "/admin/config": _admin(
            "get",
            "The configuration, without secrets, and its policies.",
            {200: _json("So it is.", "Config")},
        ),
        "/admin/snapshot": _admin(
            "get",
            "What the page shows: tenants, targets, the last calls.",
            {200: _json("So it is.", "Snapshot")},
        ),
        "/admin/reload": _admin(
            "post",
            "Read the file again.",
            {
                200: _json("It goes by the file now.", "Reloaded"),
                409: _text("There is no file."),
                422: _json("The file is wrong; nothing has changed.", "NotReloaded"),
                500: _json("It met a defect; nothing has changed.", "NotReloaded"),
            },
        ),
        "/admin/circuits/{target}/isolate": _admin(
            "post", "Leave a target alone.", {200: names, 404: change[404]}, [target]
        ),
        "/admin/circuits/{target}/close": _admin(
            "post", "Take it back.", {200: names, 404: change[404]}, [target]
        ),
        "/admin/targets/{target}/weight": _admin(
            "post",
            "Weigh a target until the next reload.",
            {200: names} | change | unfit,
            [target],
            body="Weight",
        ),
        "/admin/canary/{canary}": _admin(
            "post",
            "Change a canary.",
            {200: _json("So it stands.", "Canary")} | change | unfit,
            [canary],
            body="CanaryChange",
        ),
        OPENAPI: _admin("get", "This.", {200: _json("It is.", "Anything")}),
    }
    return operations


def _proxied(api: str, about: str) -> JSONObject:
    answers: Answers = {200: _any(f"The reply, as {api} gives it: JSON, or a stream of events.")}
    answers |= {code: _json(words, f"{api}Error") for code, words in _REFUSALS.items()}
    answers["default"] = _any("Whatever else the provider says.")
    return _operation("callers", about, answers) | {
        "security": [{"bearer": []}, {"x-api-key": []}, {"api-key": []}],
        "parameters": [
            {
                "name": "x-request-timeout",
                "in": "header",
                "description": "Seconds that are allowed for all of it.",
                "schema": {"type": "number", "exclusiveMinimum": 0},
            },
            {
                "name": "x-request-id",
                "in": "header",
                "description": "What to call it in the log.",
                "schema": {"type": "string"},
            },
        ],
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref("Asked")}}},
    }


def _models(about: str, shape: str) -> JSONObject:
    answers: Answers = {200: _json("They are.", shape)}
    answers |= {code: _json(_REFUSALS[code], "OpenAIError") for code in (400, 401, 403, 404, 431)}
    return _operation("callers", about, answers) | {
        "security": [{"bearer": []}, {"x-api-key": []}, {"api-key": []}],
    }


def _admin(
    method: str,
    about: str,
    answers: Answers,
    parameters: list[JSONObject] | None = None,
    *,
    body: str | None = None,
) -> JSONObject:
    refused: Answers = {
        401: _text("The token is needed."),
        403: _text("Without a token, this is for programs on this machine."),
        431: _text("The head is too large."),
    }
    if method == "post":
        refused |= {408: _text("The body came too slowly."), 413: _text("The body is too large.")}
        refused |= {415: _text("The body is encoded in a way that is not known.")}
        refused.setdefault(400, _text("It is no request."))
    operation = _operation("operators", about, refused | answers) | {"security": [{"bearer": []}]}
    if parameters is not None:
        operation["parameters"] = parameters
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(body)}}}
    return {method: operation}


def _operation(tag: str, about: str, answers: Answers) -> JSONObject:
    return {"tags": [tag], "summary": about, "responses": {str(code): one for code, one in answers.items()}}


def _in_path(name: str) -> JSONObject:
    return {"name": name, "in": "path", "required": True, "schema": _NAME}


def _json(about: str, shape: str) -> JSONObject:
    return {"description": about, "content": {"application/json": {"schema": _ref(shape)}}}


def _text(about: str) -> JSONObject:
    return {"description": about, "content": _TEXT}


def _either(about: str, shape: str) -> JSONObject:
    return {"description": about, "content": {"application/json": {"schema": _ref(shape)}, **_TEXT}}


def _any(about: str) -> JSONObject:
    return {"description": about, "content": {"application/json": {}, "text/event-stream": {}}}


def _ref(shape: str) -> JSONObject:
    return {"$ref": f"#/components/schemas/{shape}"}


def _object(required: str = "", **properties: JSONObject) -> JSONObject:
    return {"type": "object", "required": required.split(), "properties": properties}


def _list_of(items: JSONObject) -> JSONObject:
    return {"type": "array", "items": items}


_STRING: Final[JSONObject] = {"type": "string"}
_COUNT: Final[JSONObject] = {"type": "integer", "minimum": 0}
_SCHEMAS: Final[JSONObject] = {
    "Anything": {"type": "object"},
    "Asked": _object(
        "model",
        model={
            "type": "string",
            "minLength": 1,
            "description": "The model; only this is looked at, and stream.",
        },
        stream={"type": "boolean"},
    ),
    "OpenAIError": _object(
        "error",
        error=_object(
            "message", message=_STRING, type={"type": ["string", "null"]}, code={"type": ["string", "null"]}
        ),
    ),
    "AnthropicError": _object(
        "type error", type={"const": "error"}, error=_object("type message", type=_STRING, message=_STRING)
    ),
    "Model": _object("id", id=_STRING),
    "Models": _object("data", data=_list_of(_ref("Model"))),
    "ModelOrModels": {"anyOf": [_ref("Model"), _ref("Models")]},
    "Refused": _object("error", error=_STRING),
    "Reloaded": _object("reloaded after_restart", reloaded={"const": True}, after_restart=_list_of(_STRING)),
    "NotReloaded": _object("reloaded error", reloaded={"const": False}, error=_STRING),
    "Done": {"type": "object", "minProperties": 1, "additionalProperties": _list_of(_STRING)},
    "Weight": _object("weight", weight={"type": "number", "exclusiveMinimum": 0, "maximum": 1e6})
    | {"additionalProperties": False},
    "CanaryChange": {
        "oneOf": [
            _object("share", share={"type": "number", "minimum": 0, "maximum": 1})
            | {"additionalProperties": False},
            _object("step", step=_COUNT) | {"additionalProperties": False},
            _object("do", do={"enum": ["hold", "promote", "roll_back", "resume"]})
            | {"additionalProperties": False},
        ]
    },
    "Canary": _object(
        "model candidate state share",
        model=_STRING,
        candidate=_STRING,
        state=_STRING,
        share={"type": "number"},
    ),
    "Health": _object(
        "draining running bulkheads",
        draining={"type": "boolean"},
        running=_COUNT,
        bulkheads={"type": "object", "additionalProperties": _object("in_use queued")},
        targets=_list_of({"type": "object"}),
    ),
    "Config": _object("config pipeline", config={"type": "object"}, pipeline=_list_of(_STRING)),
    "Snapshot": _object(
        "version workers running tenants targets calls",
        version=_STRING,
        workers=_COUNT,
        running=_COUNT,
        tenants=_list_of({"type": "object"}),
        targets=_list_of({"type": "object"}),
        calls=_list_of({"type": "object"}),
    ),
}
