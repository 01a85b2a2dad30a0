"""`RankSteps`: what each of several processes did in its last step, for the journal of rank 0."""

from __future__ import annotations

import time

from fluxtrain.core.ranks.join import Ranks
from fluxtrain.events.events import RankStep
from fluxtrain.events.trace.lanes import OTHER_RANKS
from fluxtrain.methods.engine import TrainingEngine

_SAMPLED_EVERY_S = 1.0  # memory: adding it up takes a millisecond


class RankSteps:
    """Rows of all ranks, one step late: numbers of a step are known where the next one begins."""

    def __init__(self, ranks: Ranks, engine: TrainingEngine) -> None:
        self._ranks, self._engine = ranks, engine
        self._mine = [0.0] * 5
        self._sampled_s = -_SAMPLED_EVERY_S
        self.rows: tuple[RankStep, ...] = ()

    def step_took(self, tokens: int, step_s: float, stalls_s: dict[str, float]) -> None:
        """Note the last step of this rank: the tokens that it has computed, and its seconds."""
        if self._ranks.world == 1:
            return
        waited_s, now_s = stalls_s.get(OTHER_RANKS, 0.0), time.monotonic()
        self._mine[:3] = [tokens / step_s, step_s - waited_s, waited_s]
        if now_s - self._sampled_s >= _SAMPLED_EVERY_S:
            sample, self._sampled_s = self._engine.memory(), now_s
            limit_bytes = sample.device_budget_bytes or sample.device_total_bytes or 0
            self._mine[3:] = [float(sample.device_used_bytes or 0), float(limit_bytes)]

    def share(self) -> None:
        """Tell all ranks of each other's last steps; all call this at the same point."""
        ranks, width = self._ranks, len(self._mine)
        if ranks.world == 1 or not self._engine.exchange.agrees:
            return
        sent = [0.0] * (ranks.world * width)
        sent[ranks.rank * width : (ranks.rank + 1) * width] = self._mine
        found = ranks.total(sent)
        machines = [machine.split()[0] for machine, _ in ranks.processes]
        self.rows = tuple(
            RankStep(
                machine=machine,
                card=machines[:rank].count(machine) * self._engine.card_count,
                cards=self._engine.card_count,
                tokens_per_s=found[at],
                busy_s=found[at + 1],
                waited_s=found[at + 2],
                used_bytes=int(found[at + 3]),
                limit_bytes=int(found[at + 4]) or None,
            )
            for rank, machine in enumerate(machines)
            if found[(at := rank * width)]
        )
