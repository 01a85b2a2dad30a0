"""An embedding on the host of which only the rows that a batch looks up are copied to the device.

A batch of T tokens looks at T rows at most. They are gathered on the host into page-locked memory,
copied, looked up; the gradients of the same rows are downloaded and put among zeros there. Beside
150 thousand rows that is a small part; of a few hundred it is most, and reading the ids on the
host is for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from fluxtrain.plan.facts import FP32_BYTES, Embedding, GroupFacts, ModelFacts, RowFacts
from fluxtrain.plan.request import RunRequest
from fluxtrain.units import bytes_text, count_text

LEAST_TABLE_BYTES = 64 << 20  # smaller ones are copied in a few milliseconds
MOST_OF_TABLE = 0.5  # of its rows: beyond that its copies are no larger than those of rows
_INDEX_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class TableRows:
    """The memory of the rows of one embedding that a batch looks up."""

    table: GroupFacts
    rows: int  # that a batch touches at most; 0 where the batch is not known
    tokens: int
    in_vocab_chunks: bool = False  # a tied one, whose head is uploaded in vocabulary chunks

    @staticmethod
    def of(
        table: GroupFacts, row: RowFacts | None, batch_rows: int, *, in_vocab_chunks: bool = False
    ) -> TableRows:
        """Return the facts for a batch of `batch_rows` rows of data."""
        tokens = 0 if row is None else batch_rows * row.sequence_length
        rows = min(table.table_rows, tokens)
        return TableRows(table=table, rows=rows, tokens=tokens, in_vocab_chunks=in_vocab_chunks)

    @property
    def tied(self) -> bool:
        """Return whether the head needs the whole table too: copying rows then only lets the
        forward begin early."""
        return self.table.users > 1

    @property
    def weight_bytes(self) -> int:
        """Count the bytes of the rows."""
        return self.rows * (self.table.weight_bytes // self.table.table_rows)

    @property
    def gradient_bytes(self) -> int:
        """Count the bytes of their gradients in the weights' dtype, if these are downloaded
        alone."""
        alone = self.in_vocab_chunks or not self.tied
        return self.weight_bytes if self.table.trained and alone else 0

    @property
    def kept_bytes(self) -> int:
        """Count the bytes of the head's gradient of the rows, kept in fp32 until the lookup's is
        ready."""
        return FP32_BYTES * self.rows * (self.table.trained // self.table.table_rows)

    @property
    def device_bytes(self) -> int:
        """Count the device bytes of the rows, their indices, and the index of each token."""
        return self.weight_bytes + _INDEX_BYTES * (self.rows + self.tokens)

    def sum_bytes(self, passes: int, *, at_least: int = 2) -> int:
        """Count the bytes of the fp32 sums on the device of all rows that `passes` backward passes
        can touch. Sums below `at_least` are not kept on the device."""
        if passes < at_least or not self.gradient_bytes or self.in_vocab_chunks:
            return 0
        rows = min(self.table.table_rows, passes * self.tokens)
        return FP32_BYTES * rows * (self.table.trained // self.table.table_rows)

    def host_bytes(self, passes: int) -> int:
        """Count the page-locked bytes: rows on their way out, and arriving gradients of `passes`
        backward passes."""
        return self.device_bytes + max(self.gradient_bytes, self.sum_bytes(passes))


def embedding_for(facts: ModelFacts, request: RunRequest, batch_rows: int) -> Embedding:
    """Choose whether rows or the whole of the embedding are copied for a batch."""
    table = facts.table
    if table is None:
        return "whole"
    if request.embedding != "auto":
        return request.embedding
    if table.weight_bytes < LEAST_TABLE_BYTES:
        return "whole"
    found = TableRows.of(table, facts.row, batch_rows)
    return "rows" if found.rows <= MOST_OF_TABLE * table.table_rows else "whole"


def reason(facts: ModelFacts, request: RunRequest, batch_rows: int, *, on_host: bool) -> str:
    """Explain with numbers why rows or the whole are copied."""
    table = facts.table
    if table is None:
        return "no embedding that can be looked up by rows: its options need all of it"
    if not on_host:
        return f"{table.name} lives on the device with all its rows"
    if request.embedding != "auto":
        return "as set"
    size = bytes_text(table.weight_bytes)
    if table.weight_bytes < LEAST_TABLE_BYTES:
        return f"{table.name} takes {size}: copying all of it costs less than looking rows up"
    found = TableRows.of(table, facts.row, batch_rows)
    if facts.row is None:
        return f"of {table.name} ({size}) a batch needs the rows of its tokens alone"
    if found.tied:
        return (
            f"the forward begins with {bytes_text(found.weight_bytes)} of {table.name} at most: "
            f"the head's {size} are copied meanwhile"
        )
    return (
        f"a batch looks at {count_text(found.rows)} of the {count_text(table.table_rows)} rows of "
        f"{table.name} at most: {bytes_text(found.weight_bytes)} instead of {size} on the device"
    )
