"""What a client is told when the answer is no, in OpenAI's shape."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """An answer {"error": {"message", "type", "param", "code"}} with an HTTP status.

    param: the request's field at fault. code: a word for programs. headers: of the HTTP answer.
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
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The JSON object that is sent."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def overloaded(message: str) -> ApiError:
    """503: not now; clients try again."""
    return ApiError(503, message, code="overloaded", headers={"Retry-After": "1"})
