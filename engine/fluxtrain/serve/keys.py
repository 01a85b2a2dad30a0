"""API keys: made once, kept as digests, each of a project and with one of five scopes."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from typing import Literal, get_args

import sqlalchemy as sa

from fluxtrain.errors import BadInput
from fluxtrain.serve.store import Store, keys, new_id

Scope = Literal["metrics", "read", "infer", "train", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)  # each allows what those before it allow
PREFIX = "sk-flux-"


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Whose key a request carries."""

    key_id: str
    project: str
    scope: Scope

    def may(self, scope: Scope) -> bool:
        """Return whether the key allows what `scope` does."""
        return SCOPES.index(self.scope) >= SCOPES.index(scope)


def add_key(store: Store, name: str, scope: str, project: str = "default") -> str:
    """Make a key and return it; it is not kept, only its digest. Raises BadInput."""
    if scope not in SCOPES:
        raise BadInput(f"the scope is {scope!r}: use one of {', '.join(SCOPES)}")
    if not project.isidentifier():
        raise BadInput(f"the project is {project!r}: use letters, digits and underscores")
    key = PREFIX + secrets.token_urlsafe(32)
    row = {
        "id": new_id("key"),
        "name": name,
        "project": project,
        "scope": scope,
        "sha256": _digest(key),
        "created_s": store.now_s(),
    }
    with store.write() as connection:
        connection.execute(sa.insert(keys), row)
    return key


def revoke_key(store: Store, key_id: str) -> None:
    """End a key at once. Raises BadInput where there is none of this id."""
    query = sa.update(keys).where(keys.c.id == key_id, keys.c.revoked_s.is_(None))
    with store.write() as connection:
        if not connection.execute(query.values(revoked_s=store.now_s())).rowcount:
            raise BadInput(f"no key {key_id} is in use: `fluxtrain serve keys list` has the ids")


def caller_of(store: Store, key: str) -> Caller | None:
    """Return the caller of this key; None for one that is unknown or was revoked."""
    query = sa.select(keys).where(keys.c.sha256 == _digest(key), keys.c.revoked_s.is_(None))
    row = store.one(query)
    if row is None:
        return None
    return Caller(key_id=row["id"], project=row["project"], scope=row["scope"])


def _digest(key: str) -> str:
    """Return the stored hash of a key; 256 random bits need no slow hash."""
    return hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()


def listed(store: Store) -> list[dict[str, object]]:
    """Return all keys without their digests."""
    shown = [column for column in keys.c if column.name != "sha256"]
    return [dict(row) for row in store.rows(sa.select(*shown).order_by(keys.c.created_s))]
