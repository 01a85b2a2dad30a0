"""Runs the migrations on the connection that `store` gives."""

from alembic import context

from fluxtrain.serve.store import tables

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=tables,
    render_as_batch=True,  # SQLite has no ALTER of columns
)
with context.begin_transaction():
    context.run_migrations()
