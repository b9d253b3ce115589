"""Configure log lines of the test process: by default structlog draws traces with rich, which takes seconds."""

import structlog


def use_plain_format() -> None:
    """Use structlog's default format, with plain tracebacks."""
    structlog.reset_defaults()
    renderer = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[*structlog.get_config()["processors"][:-1], renderer])
