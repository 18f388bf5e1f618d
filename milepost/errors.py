"""Every error Milepost raises on purpose.

    MilepostError
    ├── ConfigError            a flag or a file: names it, its value, what is allowed, a value that works
    ├── ModelError
    │   ├── ModelConfigError   a config.json that is unknown or only half supported
    │   └── WeightsError       tensors missing, unexpected or of another shape
    ├── MissingExtra           packages of an optional part are not installed
    ├── TraceError             a trace file that can't be read: names file and line
    └── RequestError           a request that can't be served; its sender is told why
        ├── InvalidRequest     a field is wrong (HTTP 400)
        ├── PromptTooLong      it can never fit (HTTP 400)
        ├── UnknownModel       another model's name (HTTP 404)
        └── Unavailable        the engine has stopped or is stopping (HTTP 503)

An expected failure travels as one of these to whoever asked. A bug is an `AssertionError` and is never caught
to go on with a cache that may be wrong.
"""


class MilepostError(Exception):
    """The root: something outside the program has to change."""


class ConfigError(MilepostError):
    """A setting is wrong. One line: flag, value, what is allowed, a value that works."""

    def __init__(self, flag: str, value: object, allowed: str, works: object) -> None:
        super().__init__(f"{flag} {value}: {allowed}; for example {flag} {works}")
        self.flag = flag


class ModelError(MilepostError):
    """A model folder can't be served."""


class ModelConfigError(ModelError):
    """A field of config.json is not supported."""


class WeightsError(ModelError):
    """The tensors don't fit the config."""


class MissingExtra(MilepostError):
    """A part of Milepost needs packages that are not installed."""

    def __init__(self, what: str, package: str | None, extra: str) -> None:
        super().__init__(f"{what} needs the package {package}; pip install 'milepost[{extra}]' brings it")


class TraceError(MilepostError):
    """A trace can't be read."""


class RequestError(MilepostError):
    """A request is refused; the server lives on."""

    status = 400
    kind = "invalid_request_error"
    code: str | None = None

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class InvalidRequest(RequestError):
    """A field of the request is wrong."""


class PromptTooLong(RequestError):
    """The prompt, or the prompt and its answer, can never fit."""

    code = "context_length_exceeded"


class UnknownModel(RequestError):
    """The request names a model that is not served here."""

    status = 404
    code = "model_not_found"


class Unavailable(RequestError):
    """The engine is not running."""

    status = 503
    kind = "service_unavailable_error"
