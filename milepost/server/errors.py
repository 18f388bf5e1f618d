"""How a failure looks on the wire: OpenAI's `{"error": {message, type, param, code}}` with its status.

Knows HTTP statuses; decides nothing about when to fail.
"""

from typing import Any

import msgspec

from milepost.errors import InvalidRequest, RequestError


class ClientGone(Exception):
    """The client hung up: nobody is left to tell anything. Never leaves the server."""


class BodyTooLarge(RequestError):
    """The request's body is longer than the server reads."""

    status = 413


def error_body(error: RequestError) -> dict[str, Any]:
    return shape(str(error), error.kind, error.field, error.code)


def shape(message: str, kind: str, field: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


def from_msgspec(error: msgspec.MsgspecError) -> InvalidRequest:
    """Keep msgspec's sentence, and turn its path (`$.messages[0].role`) into the name of the field."""
    message = str(error)
    if not isinstance(error, msgspec.ValidationError):
        return InvalidRequest(f"the body is not valid JSON: {message}")
    reason, _, path = message.partition(" - at `")
    field = path.removesuffix("`").removeprefix("$").removeprefix(".")
    if not field and (missing := reason.partition("required field `")[2]):
        field = missing.removesuffix("`")
    return InvalidRequest(f"{field}: {reason}" if field else reason, field or None)
