"""What reading found that is not in the rows: keys that are left out, bad rows, repeated rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from fluxtrain.data.containers.record import Problem
from fluxtrain.errors import BadInput

LISTED = 10  # bad rows that are looked for before a refusal, and reasons that are named


def likewise(rows: int) -> str:
    """Say after a row how many more were refused for the same reason; "" for none."""
    return "" if rows < 2 else f" (and {rows - 1:,} more row{'s' * (rows > 2)})"


@dataclass(slots=True)
class Report:
    """Counts over the rows that were read so far."""

    rows: int = 0  # documents, that is texts or conversations
    blank: int = 0  # texts without words
    bad: int = 0
    # by reason: the first of the bad rows that have it, and how many do
    problems: dict[str, tuple[Problem, int]] = field(default_factory=dict)
    ignored: Counter[str] = field(default_factory=Counter)  # key -> rows that have it
    shadowed: dict[str, str] = field(default_factory=dict)  # left out -> the key in small letters
    left_out_files: list[str] = field(default_factory=list)
    repeated: str = ""  # a sentence; empty where no row repeats another or this was not looked for
    repeated_ids: str = ""
    leaked: str = ""  # held-out rows that are trained on too

    def take(self, problem: Problem) -> None:
        """Count a bad row, and keep the first one of each reason."""
        self.bad += 1
        self._keep(problem, 1)

    def _keep(self, problem: Problem, rows: int) -> None:
        first, before = self.problems.get(problem.said, (problem, 0))
        if before or len(self.problems) < LISTED:
            self.problems[problem.said] = (first, before + rows)

    def add(self, other: Report) -> None:
        """Add the counts of another reading."""
        self.rows += other.rows
        self.blank += other.blank
        self.bad += other.bad
        for problem, rows in other.problems.values():
            self._keep(problem, rows)
        self.ignored.update(other.ignored)
        self.shadowed |= other.shadowed
        self.left_out_files += other.left_out_files

    def check(self, limit: int, whole: bool = True) -> None:
        """Raise BadInput if more rows are bad than `limit`, with a list of them.

        `whole`: every row was read, so the count is exact.
        """
        if self.bad <= limit:
            return
        if self.bad == 1 and limit == 0:
            raise BadInput(f"{next(self._listed())} (data.max_bad_rows is 0)")
        count = f"{self.bad:,}{'' if whole else ' or more'}"
        raise BadInput(
            f"{count} rows cannot be used, and data.max_bad_rows is {limit}: "
            f"{'; '.join(self._listed())}: repair them, or raise data.max_bad_rows to leave such "
            "rows out"
        )

    def _listed(self) -> Iterator[str]:
        """Yield the reasons, each with its first row; the name of a file stands once."""
        before = ""
        for problem, rows in self.problems.values():
            told = str(problem) if problem.origin.file != before else problem.short
            yield told + likewise(rows)
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
        if self.shadowed:
            key, known = next(iter(self.shadowed.items()))
            said.append(
                f"`{key}` and `{known}` differ in case alone, and `{known}` is read: to read the "
                f"other one set data.columns={{{known}: {key}}} with data.ignore=[{known}]"
            )
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
