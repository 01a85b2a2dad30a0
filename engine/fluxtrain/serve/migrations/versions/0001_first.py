"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Make them."""
    op.create_table(
        "alias",
        sa.Column("number", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("project", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("version", sa.String(), nullable=True),
        sa.Column("moved_s", sa.Float(), nullable=False),
        sa.Column("why", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("number"),
    )
    op.create_index("alias_name", "alias", ["project", "name"], unique=False)
    op.create_table(
        "file",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("project", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("bytes", sa.Integer(), nullable=False),
        sa.Column("rows", sa.Integer(), nullable=False),
        sa.Column("blob", sa.String(), nullable=False),
        sa.Column("created_s", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(op.f("ix_file_blob"), "file", ["blob"], unique=False)
    op.create_index(op.f("ix_file_project"), "file", ["project"], unique=False)
    op.create_table(
        "job",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("project", sa.String(), nullable=False),
        sa.Column("created_s", sa.Float(), nullable=False),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.Column("plan", sa.JSON(), nullable=False),
        sa.Column("blobs", sa.JSON(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("repeat_key", sa.String(), nullable=True),
        sa.Column("wanted", sa.String(), nullable=False),
        sa.Column("card", sa.Integer(), nullable=True),
        sa.Column("tries", sa.JSON(), nullable=False),
        sa.Column("not_before_s", sa.Float(), nullable=False),
        sa.Column("notes", sa.JSON(), nullable=False),
        sa.Column("outcome", sa.JSON(none_as_null=True), nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("number"),
        sa.UniqueConstraint("project", "repeat_key", name="one_job_a_key"),
    )
    op.create_index(op.f("ix_job_digest"), "job", ["digest"], unique=False)
    op.create_index("job_order", "job", ["project", "number"], unique=False)
    op.create_table(
        "key",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("project", sa.String(), nullable=False),
        sa.Column("scope", sa.String(), nullable=False),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("created_s", sa.Float(), nullable=False),
        sa.Column("revoked_s", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("sha256"),
    )
    op.create_table(
        "usage",
        sa.Column("number", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("project", sa.String(), nullable=False),
        sa.Column("at_s", sa.Float(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("amount", sa.Float(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("number"),
    )
    op.create_index("usage_when", "usage", ["project", "at_s"], unique=False)
    op.create_table(
        "version",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("project", sa.String(), nullable=False),
        sa.Column("job", sa.String(), nullable=False),
        sa.Column("base", sa.String(), nullable=False),
        sa.Column("method", sa.String(), nullable=False),
        sa.Column("artifact", sa.String(), nullable=False),
        sa.Column("facts", sa.JSON(), nullable=False),
        sa.Column("created_s", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("job"),
    )
    op.create_index(op.f("ix_version_project"), "version", ["project"], unique=False)
