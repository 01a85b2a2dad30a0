"""Several servers: who looks after a job, and until when."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add the table of servers and the server of a job; count bytes and rows beyond 2**31."""
    op.create_table(
        "server",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("host", sa.String, nullable=False),
        sa.Column("folder", sa.String, nullable=False),
        sa.Column("until_s", sa.Float, nullable=False),
    )
    with op.batch_alter_table("job") as job:
        job.add_column(sa.Column("server", sa.String))
    with op.batch_alter_table("file") as file:
        file.alter_column("bytes", type_=sa.BigInteger)
        file.alter_column("rows", type_=sa.BigInteger)
