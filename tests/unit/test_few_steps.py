"""A run of a handful of steps or of held-out documents is told, with the cure."""

from __future__ import annotations

import pytest

from fluxtrain.config.choices import FEW_STEPS, Schedule, choose_schedule
from fluxtrain.config.schema import TrainSettings
from fluxtrain.data.splitting import few_held_out


def scheduled(settings: TrainSettings, steps_per_epoch: int) -> Schedule:
    return choose_schedule(settings, steps_per_epoch=steps_per_epoch, usual_rate=(1e-4, "usual"))


@pytest.mark.parametrize("steps_per_epoch", [1, 2, 9])
def test_a_run_of_a_few_steps_is_told_and_the_epochs_that_it_names_are_enough(
    steps_per_epoch: int,
) -> None:
    [told] = scheduled(TrainSettings(epochs=1), steps_per_epoch).told
    epochs = float(told.partition("train.epochs=")[2].split()[0])
    assert not (again := scheduled(TrainSettings(epochs=epochs), steps_per_epoch)).told
    assert f"for {again.total_steps} steps" in told


def test_so_few_steps_as_were_asked_for_and_enough_of_them_are_not_told() -> None:
    assert not scheduled(TrainSettings(steps=2), 2).told
    assert not scheduled(TrainSettings(epochs=1), FEW_STEPS).told


@pytest.mark.parametrize(
    ("documents", "of", "share"), [(4, 200, "0.05"), (2, 100, "0.1"), (1, 50, "0.2")]
)
def test_a_handful_of_held_out_documents_is_told_with_a_share_that_holds_out_more(
    documents: int, of: int, share: str
) -> None:
    [told] = few_held_out(documents, 36, of)
    assert f"data.held_out={share}, or name data to evaluate on" in told
    assert float(share) * of >= 10


def test_few_documents_in_all_are_told_without_a_share_and_long_ones_not_at_all() -> None:
    [told] = few_held_out(1, 36, 5)
    assert "data.held_out=" not in told and "data.held_out_path" in told
    assert few_held_out(0, 0, 200) == [] == few_held_out(1, 20_000, 1)
    assert few_held_out(10, 36, 500) == []
