"""API keys: who may ask, and how much. Keys come from a YAML file or from the environment.

keys:
  - name: alice            # whose files and batches these are
    key: sk-...            # or sha256: the key's SHA-256 in hex
    requests_per_minute: 60
    concurrent: 8          # requests at the same time
    batches: 4             # batches that have not ended
    admin: true            # may scale, drain and restart replicas
"""

import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from engine.wanted import nearest

ENVIRONMENT = "BISHOP_API_KEYS"
"""`alice=sk-1,bob=sk-2`, or keys alone."""

MIN_CHARACTERS = 8

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A limit of None is no limit. digest: SHA-256 of the key; the key itself is not kept."""

    name: str
    digest: bytes
    requests_per_minute: int | None = None
    concurrent: int | None = None
    batches: int | None = None
    admin: bool = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"the name of an API key has letters, digits, . _ -: {self.name!r}")
        for limit in ("requests_per_minute", "concurrent", "batches"):
            value = getattr(self, limit)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"API key {self.name}: {limit} must be a whole number above 0")
        if type(self.admin) is not bool:
            raise ValueError(f"API key {self.name}: admin must be true or false")


OPTIONS = tuple(f.name for f in fields(ApiKey) if f.name not in ("name", "digest"))


class KeyRing:
    """The keys of one server; without any, everybody may ask."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        names = [key.name for key in keys]
        if len(set(names)) < len(names):
            raise ValueError("two API keys have the same name")
        self._keys = tuple(keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def find(self, presented: str) -> ApiKey | None:
        """The key that was presented. Takes as long for a wrong one as for a right one."""
        digest = _digest(presented)
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found


def load(path: Path | None, environment: Mapping[str, str]) -> tuple[ApiKey, ...]:
    """The keys of a file and of the environment. Raises ValueError naming what is wrong."""
    keys = [] if path is None else _read(path)
    entries = filter(None, (part.strip() for part in environment.get(ENVIRONMENT, "").split(",")))
    for number, entry in enumerate(entries, start=1):
        name, equals, secret = entry.rpartition("=")
        keys.append(_key({"name": name if equals else f"key-{number}", "key": secret}, number))
    KeyRing(keys)
    return tuple(keys)


def _read(path: Path) -> list[ApiKey]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, yaml.YAMLError):
        raise ValueError(f"{path} is not YAML") from None
    if not isinstance(content, dict) or list(content) != ["keys"]:
        raise ValueError(f"{path} must hold one list, named 'keys'")
    entries = content["keys"]
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{path}: 'keys' must be a list of mappings")
    return [_key(entry, number) for number, entry in enumerate(entries, start=1)]


def _key(entry: Mapping[str, Any], number: int) -> ApiKey:
    known = ("name", "key", "sha256", *OPTIONS)
    for name in entry:
        if name not in known:
            raise ValueError(f"API key {number}: unknown {str(name)!r}{nearest(str(name), known)}")
    options = {name: entry[name] for name in OPTIONS if name in entry}
    name = entry.get("name", f"key-{number}")
    return ApiKey(name=str(name), digest=_digest_of(entry, number), **options)


def _digest_of(entry: Mapping[str, Any], number: int) -> bytes:
    if ("key" in entry) == ("sha256" in entry):
        raise ValueError(f"API key {number}: give either key or sha256")
    if "sha256" in entry:
        text = str(entry["sha256"])
        if not re.fullmatch(r"[0-9a-fA-F]{64}", text):
            raise ValueError(f"API key {number}: sha256 has 64 hexadecimal digits")
        return bytes.fromhex(text)
    if len(str(entry["key"])) < MIN_CHARACTERS:
        raise ValueError(f"API key {number}: a key has {MIN_CHARACTERS} characters or more")
    return _digest(str(entry["key"]))


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()
