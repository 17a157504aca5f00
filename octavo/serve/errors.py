"""What a client is told when the answer is no, in OpenAI's shape."""

from __future__ import annotations

from typing import Any

INTERNAL = "the server failed on this request"
SHUTDOWN = "the server is shutting down"
MOST_MESSAGE, MOST_PARAM = 500, 128  # characters: a text may repeat what a client sent


class ApiError(Exception):
    """An answer {"error": {"message", "type", "param", "code"}} with an HTTP status.

    param: the request's field at fault. code: a word for programs. headers: of the HTTP answer.
    Long texts are cut to MOST_MESSAGE and MOST_PARAM characters.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code = status, code
        self.message, self.param = _cut(message, MOST_MESSAGE), None if param is None else _cut(param, MOST_PARAM)
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The JSON object that is sent."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def overloaded(message: str) -> ApiError:
    """503: not now; clients try again."""
    return ApiError(503, message, code="overloaded", headers={"Retry-After": "1"})
