"""Log lines: text for people, or one JSON object a line for machines."""

import json
import logging
import time
from typing import Literal

from serving.scope import RequestIdFilter

LogFormat = Literal["text", "json"]


class JsonFormatter(logging.Formatter):
    """time (UTC), level, logger, message, request_id; key where there is one; of a request's last
    line also method, path, status, ms; of a failure also exception."""

    def format(self, record: logging.LogRecord) -> str:
        told = {
            "time": self._time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": getattr(record, "request_id", "-"),
            **getattr(record, "http", {}),
        }
        if key := getattr(record, "key", None):
            told["key"] = key
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)

    def _time(self, record: logging.LogRecord) -> str:
        whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        return f"{whole}.{int(record.msecs):03d}Z"


def log_to_stderr(format: LogFormat) -> None:
    """Everything from INFO on, with the id of the request it belongs to."""
    handler = logging.StreamHandler()
    handler.addFilter(RequestIdFilter())
    line = "%(asctime)s %(levelname)s [%(request_id)s] %(message)s"
    handler.setFormatter(JsonFormatter() if format == "json" else logging.Formatter(line))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
