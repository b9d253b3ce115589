"""The OpenAPI document of the API, made from the declared endpoints and the models of their answers."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from forgekeeper.cli.console.problem_details import API_ROOT, PROBLEM_MEDIA_TYPE
from forgekeeper.cli.console.tokens import TOKEN_PREFIX
from forgekeeper.cli.console.web_api.endpoints import DECLARED_ENDPOINTS, Endpoint, Parameter
from forgekeeper.cli.console.web_api.models import ProblemAnswer
from forgekeeper.ledger.heartbeats import read_version

OPENAPI_ADDRESS = "/openapi.json"
OPENAPI_VERSION = "3.1.0"
SCHEMA_ADDRESS = "#/components/schemas/{model}"
ERROR_STATUSES = {
    400: "A parameter is wrong.",
    401: "The token is missing, unknown or expired.",
    403: "The request did not come from the proxy.",
    404: "The named thing does not exist.",
    429: "Too many tokens or logins of this address were wrong.",
    503: "A server does not answer, or the console is busy.",
}
DESCRIPTION = (
    "The JSON of forgekeeper's commands, to read only. Times are ISO 8601 in UTC. A token has the form"
    f" {TOKEN_PREFIX}…; `forgekeeper console token add NAME` makes it."
)


@cache
def build_document() -> dict[str, Any]:
    """Build the document; all endpoints must be declared."""
    models: dict[type[BaseModel], None] = dict.fromkeys([*(one.answer for one in DECLARED_ENDPOINTS), ProblemAnswer])
    _, schemas = models_json_schema([(model, "validation") for model in models], ref_template=SCHEMA_ADDRESS)
    return {
        "openapi": OPENAPI_VERSION,
        "info": {"title": "forgekeeper", "version": read_version(), "description": DESCRIPTION},
        "servers": [{"url": API_ROOT}],
        "security": [{"token": []}, {}],
        "paths": {one.address: {"get": _describe_operation(one)} for one in DECLARED_ENDPOINTS},
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": schemas["$defs"],
            "responses": {
                _name_response(status): {
                    "description": sentence,
                    "content": {PROBLEM_MEDIA_TYPE: {"schema": _refer_to(ProblemAnswer)}},
                }
                for status, sentence in ERROR_STATUSES.items()
            },
        },
    }


def _describe_operation(one: Endpoint) -> dict[str, Any]:
    summary, _, rest = inspect.getdoc(one.read_facts).partition("\n\n")  # type: ignore[union-attr]  # each has one
    return {
        "operationId": one.read_facts.__name__,
        "summary": " ".join(summary.split()),
        **({"description": " ".join(rest.split())} if rest else {}),
        "parameters": [
            *_describe_parameters(one.path_parameters, place="path"),
            *_describe_parameters(one.query, place="query"),
        ],
        "responses": {
            "200": {"description": "The answer.", "content": {"application/json": {"schema": _refer_to(one.answer)}}},
            **{str(status): {"$ref": f"#/components/responses/{_name_response(status)}"} for status in ERROR_STATUSES},
        },
    }


def _describe_parameters(parameters: Sequence[Parameter], *, place: str) -> list[dict[str, Any]]:
    return [
        {
            "name": one.name,
            "in": place,
            "description": one.description,
            "schema": dict(one.schema),
            "required": place == "path",
        }
        for one in parameters
    ]


def _refer_to(model: type) -> dict[str, str]:
    return {"$ref": SCHEMA_ADDRESS.format(model=model.__name__)}


def _name_response(status: int) -> str:
    return HTTPStatus(status).phrase.replace(" ", "")
