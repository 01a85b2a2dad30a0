"""The folder of a server: one server each, on a local disk, with tables of this version."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from fluxtrain.errors import BadInput
from fluxtrain.serve import database
from fluxtrain.serve.keys import add_key, caller_of
from fluxtrain.serve.settings import load_settings
from fluxtrain.serve.store import Store, tables

MOUNTS = "21 1 8:1 / / rw - ext4 /dev/sda rw\n30 21 0:40 / {place} rw - {kind} server:/x rw\n"


def test_two_servers_have_not_one_folder_and_commands_may_work_beside_one(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(BadInput, match="another server"):
        Store(tmp_path)
    beside = Store(tmp_path, alone=False)
    caller = caller_of(store, add_key(beside, "a", "infer", "team"))
    assert caller is not None and (caller.project, caller.scope) == ("team", "infer")
    beside.close()
    store.close()
    Store(tmp_path).close()
    assert (tmp_path / "service.db").stat().st_mode & 0o077 == 0


def test_a_server_looks_for_runs_where_the_one_before_did(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.keep_to(tmp_path / "runs")
    store.keep_to(tmp_path / "runs")
    with pytest.raises(BadInput, match=f"FLUXTRAIN_RUNS={tmp_path / 'runs'}"):
        store.keep_to(tmp_path / "others")
    store.close()


FIRST = """
DROP TABLE server;
ALTER TABLE job DROP COLUMN server;
UPDATE alembic_version SET version_num = '0001'
"""


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_new_and_older_databases_have_the_tables_of_this_version(
    tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    on_postgres = kind == "postgresql"
    db = request.getfixturevalue("postgres").new_database() if on_postgres else None
    for _ in ("new", "opened again", "of the first version"):
        store = Store(tmp_path, db=db)
        with store.engine.connect() as connection:
            context = MigrationContext.configure(connection)
            assert compare_metadata(context, tables) == []
            assert context.get_current_revision() is not None
        with store.write() as connection:
            for statement in FIRST.split(";"):
                connection.execute(sa.text(statement))
        store.close()


def test_a_database_of_another_version_or_none_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.write() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    store.close()
    with pytest.raises(BadInput, match="another version"):
        Store(tmp_path)
    (tmp_path / "service.db").write_bytes(b"no database" * 1000)
    with pytest.raises(BadInput, match="cannot be used"):
        Store(tmp_path)


@pytest.mark.parametrize(("kind", "refused"), [("nfs4", True), ("cifs", True), ("xfs", False)])
def test_a_network_mount_is_refused(kind: str, refused: bool, tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS.format(place=tmp_path, kind=kind))
    if refused:
        with pytest.raises(BadInput, match=f"on a {kind} mount"):
            database.refuse_network_mount(tmp_path / "service", mounts)
    else:
        database.refuse_network_mount(tmp_path / "service", mounts)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("modelz: {}", "modelz"),
        ("models: {a: {path: demo, method: lora}}", "method: full"),
        ("quotas: {card_hours: 0}", "card_hours"),
        ("cards: [a]", "cards"),
        ("models: {a: {method: lora}}", r"serve\.yaml: models\.a\.path is missing$"),
    ],
)
def test_a_mistake_in_the_operators_file_is_named(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    with pytest.raises(BadInput, match=told):
        load_settings(path)


def test_the_page_shows_a_file_that_is_read(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "service.md"
    path = tmp_path / "serve.yaml"
    path.write_text(page.read_text().partition("```yaml\n")[2].partition("```")[0])
    assert load_settings(path).models["llama-8b"].method == "qlora"
