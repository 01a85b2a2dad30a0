"""A server's right to the jobs that it took, while others share its database.

It ends `LEASE_S` after the last renewal, by the database's clock. Whoever takes a job of a server
whose lease ended deletes that server's row: a server that hung finds itself without one, begins
again under another id, and none of its changes of jobs that others took is accepted.
"""

from __future__ import annotations

import os
import threading
import time

import sqlalchemy as sa

from fluxtrain.errors import BadInput
from fluxtrain.serve.refusal import Refusal
from fluxtrain.serve.store import Store, new_id, servers

LEASE_S = 15.0
RENEW_S = 3.0


class Lease:
    """The row of this server, renewed by a thread; with SQLite there is one server, for good."""

    def __init__(self, store: Store) -> None:
        """Take the first lease.

        Raises BadInput where another server uses another folder, Refusal without a database.
        """
        self.id = ""
        self._store = store
        self._until_s = 0.0  # by this machine's clock, and never after the database's
        self._began_s = 0.0  # of renewals without a gap
        self._leads = False
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self.renew()

    @property
    def holds(self) -> bool:
        """Return whether the jobs are still this server's, as far as it can know."""
        return not self._store.is_shared or time.monotonic() < self._until_s

    @property
    def leads(self) -> bool:
        """Return whether this server does what one of several has to do."""
        return self._leads and self.holds

    def start(self) -> None:
        """Renew it from now on."""
        if self._store.is_shared:
            self._thread.start()

    def close(self) -> None:
        """Let others take the jobs at once, where the database answers."""
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join()
        try:
            with self._store.reach() as connection:
                connection.execute(sa.delete(servers).where(servers.c.id == self.id))
        except Refusal:
            return

    def renew(self) -> None:
        """Lengthen the lease; where its row is gone, begin another. Raises Refusal."""
        store, asked_s = self._store, time.monotonic()
        with store.reach() as connection:
            now_s = connection.execute(sa.select(store.clock)).scalar_one()
            ahead_s, until_s = now_s - time.time(), now_s + LEASE_S
            mine, own_id = sa.update(servers).where(servers.c.id == self.id), self.id
            if not connection.execute(mine.values(until_s=until_s)).rowcount:
                own_id = self._begin(connection, now_s)
        self.id = own_id
        store.ahead_s = ahead_s if store.is_shared else 0.0
        if asked_s > self._until_s:
            self._began_s = asked_s
        self._until_s = asked_s + LEASE_S
        others = self.living() - {self.id}
        self._leads = all(self.id < other for other in others)
        store.changes += bool(others)  # they may have written

    def living(self) -> frozenset[str]:
        """Return the servers whose jobs are theirs. Raises Refusal.

        Where this server's own lease had a gap, as after a restart of the database, those of the
        others had one too: they get the time to renew them.
        """
        clock, found = self._store.clock, sa.select(servers.c.id)
        if time.monotonic() > self._began_s + LEASE_S:
            found = found.where(servers.c.until_s.between(clock, clock + LEASE_S))
        return frozenset(row["id"] for row in self._store.rows(found))

    def _begin(self, connection: sa.Connection, now_s: float) -> str:
        """Add a row under a new id, and remove rows that ended long ago; return the id."""
        ended = servers.c.until_s < now_s - LEASE_S if self._store.is_shared else sa.true()
        connection.execute(sa.delete(servers).where(ended))
        other = sa.select(servers).where(servers.c.folder != self._store.mark)
        if (found := connection.execute(other).mappings().first()) is not None:
            raise BadInput(
                f"the server on {found['host']} has the same database and another folder than "
                f"{self._store.folder}: let both use one folder, on a disk that they share"
            )
        row = {
            "id": new_id(f"server-{now_s:.3f}"),  # the oldest leads
            "host": os.uname().nodename,
            "folder": self._store.mark,
            "until_s": now_s + LEASE_S,
        }
        connection.execute(sa.insert(servers), row)
        return str(row["id"])

    def _run(self) -> None:
        while not self._ends.wait(RENEW_S):
            try:
                self.renew()
            except (Refusal, BadInput):  # the store has said why
                continue
