"""What reading found that is not in the rows: keys that are left out, bad rows, repeated rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from fluxtrain.data.containers.record import Problem
from fluxtrain.errors import BadInput

LISTED = 10  # bad rows that are named; more are counted


@dataclass(slots=True)
class Report:
    """Counts over the rows that were read so far."""

    rows: int = 0  # documents, that is texts or conversations
    blank: int = 0  # texts without words
    bad: int = 0
    problems: list[Problem] = field(default_factory=list)  # the first of the bad rows
    ignored: Counter[str] = field(default_factory=Counter)  # key -> rows that have it
    left_out_files: list[str] = field(default_factory=list)
    repeated: str = ""  # a sentence; empty where no row repeats another or this was not looked for
    repeated_ids: str = ""
    leaked: str = ""  # held-out rows that are trained on too

    def take(self, problem: Problem) -> None:
        """Count a bad row, and list the first ones."""
        self.bad += 1
        if len(self.problems) < LISTED:
            self.problems.append(problem)

    def add(self, other: Report) -> None:
        """Count what another reading found as well."""
        self.rows += other.rows
        self.blank += other.blank
        self.bad += other.bad
        self.problems = (self.problems + other.problems)[:LISTED]
        self.ignored.update(other.ignored)
        self.left_out_files += other.left_out_files

    def check(self, limit: int, whole: bool = True) -> None:
        """Raise BadInput if more rows are bad than `limit`, with a list of them.

        `whole`: every row was read, so the count is exact.
        """
        if self.bad <= limit:
            return
        if self.bad == 1 and limit == 0:
            raise BadInput(f"{self.problems[0]} (data.max_bad_rows is 0)")
        count = f"{self.bad:,}{'' if whole else ' or more'}"
        raise BadInput(
            f"{count} rows cannot be used, and data.max_bad_rows is {limit}: "
            f"{'; '.join(self._listed())}: repair them, or raise data.max_bad_rows to leave such "
            "rows out"
        )

    def _listed(self) -> Iterator[str]:
        """Yield the listed rows; the name of a file stands before its first one."""
        before = ""
        for problem in self.problems:
            yield str(problem) if problem.origin.file != before else problem.short
            before = problem.origin.file

    def lines(self) -> list[str]:
        """Return sentences about what is not trained on; none if everything is."""
        said = []
        if self.ignored:
            keys = ", ".join(
                f"`{key}` (in {rows:,} rows)" for key, rows in self.ignored.most_common(12)
            )
            more = f" and {len(self.ignored) - 12} others" if len(self.ignored) > 12 else ""
            said.append(f"keys that are left out: {keys}{more}")
        if self.blank:
            said.append(f"texts without words, left out: {self.blank:,}")
        if self.bad:
            said.append(f"bad rows, left out: {self.bad:,}: {'; '.join(self._listed())}")
        if self.left_out_files:
            names = ", ".join(self.left_out_files[:6])
            more = ", ..." if len(self.left_out_files) > 6 else ""
            said.append(
                f"files of the folder that are left out: {len(self.left_out_files)} ({names}{more})"
            )
        return said + [line for line in (self.repeated, self.repeated_ids, self.leaked) if line]
