"""From a probe of several cards to the rates that steps on them are timed with."""

from __future__ import annotations

from dataclasses import replace

from fluxtrain.plan.calibration import Calibration, Line
from fluxtrain.plan.rates import CardsRates, Rates, cards_rates_from, rates_from

PER_S: dict[str, float | None] = {
    "gpu_matmul": 700e12,
    "adamw": 4e9,
    "host_copy": 60e9,
    "h2d_pinned": 50e9,
    "d2h_pinned": 50e9,
}
PROBED: dict[str, float | None] = {
    **PER_S,
    "card1_gpu_matmul": 350e12,
    "card1_h2d_pinned": 12e9,
    "card1_d2h_pinned": None,
    "card2_gpu_matmul": 690e12,
    "cards_h2d": 80e9,
    "peer_0_1": 20e9,
    "peer_1_0": None,
    "peer_2_0": 300e9,
}
TIMED = Calibration(
    forward=Line(base=0.0, slope=0.001),
    backward=Line(base=0.0, slope=0.003),
    outside_forward=Line(base=0.0, slope=0.001),
    outside_backward=Line(base=0.0, slope=0.0),
    activation_bytes=1 << 20,
    rows=(1, 4),
    measured_at_s=0.0,
    measuring_s=1.0,
)


def first(calibration: Calibration | None = TIMED) -> Rates:
    found = rates_from(PER_S, has_gpu=True, calibration=calibration)
    assert not isinstance(found, str)
    return found


def test_what_was_not_measured_of_a_card_is_the_first_cards() -> None:
    one, slow, alike = cards_rates_from(first(), PROBED, [0, 1, 2]).cards
    assert one == first()
    assert (slow.up, slow.down) == (12e9, 50e9)
    assert (alike.up, alike.down) == (50e9, 50e9)


def test_a_block_takes_as_much_longer_as_the_cards_arithmetic() -> None:
    _, slow, alike = cards_rates_from(first(), PROBED, [0, 1, 2]).cards
    assert slow.calibration is not None and slow.calibration.forward.slope == 0.002
    assert alike.calibration is TIMED  # less than noise apart
    untimed = cards_rates_from(first(None), PROBED, [0, 1]).cards[1]
    assert untimed.matmul_per_s == 350e12


def test_a_block_that_was_timed_on_a_card_counts_more_than_its_arithmetic() -> None:
    own = replace(TIMED, forward=Line(base=0.0, slope=0.007))
    found = cards_rates_from(first(), PROBED, [0, 1], {1: own})
    assert found.cards[1].calibration is own


def test_a_block_that_was_timed_on_another_card_than_the_first_is_that_cards() -> None:
    one, slow, alike = cards_rates_from(first(), PROBED, [0, 1, 2], timed_on=1).cards
    assert slow.calibration is TIMED
    assert one.calibration is not None and one.calibration.forward.slope == 0.0005
    assert alike.calibration is not None and alike.calibration.forward.slope < 0.0006
    assert (one.matmul_per_s, slow.matmul_per_s) == (700e12, 350e12)
    assert (slow.up, slow.down) == (12e9, 50e9)


def test_pairs_and_buses_come_from_the_probe_by_torchs_numbers() -> None:
    found = cards_rates_from(first(), PROBED, [2, 0, 1])
    assert found.peers == {(0, 1): 300e9, (1, 2): 20e9}
    assert found.up_together_bytes_per_s == 80e9
    assert found.down_together_bytes_per_s is None
    assert found.host_bytes_per_s == 120e9  # AdamW reaches 26 bytes for each of its 4 G parameters


def test_cards_in_another_order_keep_their_rates_and_links() -> None:
    first = Rates(has_gpu=True, matmul_per_s=1e14, adamw_per_s=1e9, h2d_bytes_per_s=5e10)
    known = CardsRates(
        cards=(first, replace(first, matmul_per_s=2e14), replace(first, matmul_per_s=3e14)),
        peers={(0, 2): 1e9, (1, 0): 2e9},
    )
    turned = known.in_order([2, 0, 1])
    assert [card.matmul_per_s for card in turned.cards] == [3e14, 1e14, 2e14]
    assert turned.peers == {(1, 0): 1e9, (2, 1): 2e9}
