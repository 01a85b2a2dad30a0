"""The task of language models: text rows from the data of a configuration, by next-token loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fluxtrain.config.schema import RunConfig
from fluxtrain.data.batches import Batch, BatchSource, fullest_batch, in_order, typical_batch
from fluxtrain.data.demo import PROMPT
from fluxtrain.data.packing import Fit, PackedRows
from fluxtrain.data.prepare import DataSource, ModelLimits, PreparedData, prepare
from fluxtrain.data.reading.corpus import Corpus, Reading
from fluxtrain.data.reading.request import DEMO, read_request
from fluxtrain.data.rendering.named import NAMED
from fluxtrain.data.shapes.keys import TITLES
from fluxtrain.data.splitting import few_held_out
from fluxtrain.events.events import ChoiceMade, SampleFit
from fluxtrain.methods.objective import BoundTask, Part, SamplePrompt, Task, choose_attention
from fluxtrain.models.known_packing import known_packing
from fluxtrain.models.loading import LoadedModel

Forward = Callable[[], Any]


def cross_entropy_and_rest(model: nn.Module, forward: Forward) -> tuple[Tensor, Tensor | None]:
    """Call `forward`, which runs `model` with labels; return its cross entropy, and the rest of
    its loss: None for models that add nothing."""
    if not _adds_terms(model):
        loss: Tensor = forward().loss
        return loss, None
    known: Any = model
    own, found = known.loss_function, list[Tensor]()

    def noted(*arguments: Any, **options: Any) -> Tensor:
        entropy: Tensor = own(*arguments, **options)
        found.append(entropy)
        return entropy.clone()  # models add to it in place

    had = known.__dict__.get("_loss_function")
    known.loss_function = noted
    try:
        whole: Tensor = forward().loss
    finally:
        if had is None:
            del known._loss_function
        else:
            known._loss_function = had
    return (found[0], whole - found[0]) if len(found) == 1 else (whole, None)


def _adds_terms(model: nn.Module) -> bool:
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(model, "loss_function"):
        return False
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return bool(getattr(text, "output_router_logits", False))


class CausalLM:
    """The mean cross entropy over labelled tokens, of Hugging Face causal language models."""

    unit = "tokens"

    def count(self, batch: Batch) -> int:
        """Count the labels, which the loss is a mean over."""
        return batch.predicted

    def rows(self, batch: Batch) -> int:
        """Count the packed rows."""
        return int(batch.input_ids.shape[0])

    def tokens(self, batch: Batch) -> int:
        """Count the tokens that are no padding."""
        return batch.tokens

    def loss(self, model: nn.Module, batch: Batch, step_count: int) -> Tensor:
        """Compute the summed cross entropy of the batch in nats, divided by `step_count` labels.

        What the model adds to it (the router loss of experts) counts with the batch's share.
        """
        choose_attention(batch.input_ids.shape[1])
        entropy, rest = self._terms(model, batch, step_count)
        return entropy if rest is None else entropy + rest * (batch.predicted / step_count)

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, float]:
        """Compute the mean cross entropy in nats a token, without what the model adds to it."""
        return {"loss": float(self._terms(model, batch, batch.predicted)[0])}

    def _terms(
        self, model: nn.Module, batch: Batch, step_count: int
    ) -> tuple[Tensor, Tensor | None]:
        with known_packing(mixes=batch.mixes):
            return cross_entropy_and_rest(model, lambda: model(**batch.inputs(step_count)))

    def to(self, batch: Batch, device: torch.device) -> Batch:
        """Copy ids, labels and positions to `device`."""
        return replace(
            batch,
            input_ids=batch.input_ids.to(device),
            labels=batch.labels.to(device),
            position_ids=batch.position_ids.to(device),
        )


PROMPT_CHARACTERS = 60
_LOOKED_AT_ROWS = 64  # of the data, for the tokens of its chat template
_COMPARED_ROWS = 1024  # of an embedding, for the usual size of a row
_SMALLEST_NORM = 0.01  # of a trained row, as a share of the usual one

Tell = Callable[[str], None]
Waits = Callable[[Callable[[], Any]], Any]  # makes it once more where the disk was full


@dataclass(frozen=True, kw_only=True)
class TextTask(Task[Batch]):
    """Packed rows of the data of a configuration, and the objective over them."""

    data: PreparedData
    accumulation: int
    seed: int

    def notes(self, part: Part) -> list[str]:
        """Return notes on left-out, repeated, and too long rows."""
        data = self.data
        held = data.held_out
        few = few_held_out(held.fit.samples, held.token_count, data.documents)
        told = [*data.told, *data.notes.sentences(), *self.packed(part).fit.sentences()]
        return told + few if part == "trained" and not data.has_own_held_out else told

    def rows(self, part: Part) -> int:
        """Count the packed rows of a part."""
        return len(self.packed(part))

    def fingerprint(self, part: Part) -> str | None:
        """Hash every token of a part and its place."""
        rows = self.packed(part)
        return rows.fingerprint() if len(rows) else None

    def sample_fit(self) -> SampleFit:
        """Count the documents to train on that do not fit into a row."""
        return counted(self.data.trained.fit)

    def bound(self, batch_rows: int) -> BoundTask[Batch]:
        """Serve shuffled rows, and the held-out ones in order. Raises BadInput for too few rows."""
        return BoundTask(
            objective=self.objective,
            data=BatchSource(self.data.trained, batch_rows, self.accumulation, self.seed),
            held_out=lambda: self.in_order("held_out", batch_rows),
        )

    def in_order(self, part: Part, batch_rows: int) -> Iterable[Batch]:
        """Yield the packed rows of a part as they lie in the data."""
        return in_order(self.packed(part), batch_rows)

    def typical(self, rows: int) -> Batch:
        """Return rows from all over the data, as long as any row can be."""
        return typical_batch(self.data.trained, rows)

    def fullest(self, rows: int) -> Batch | None:
        """Return the rows with the most documents, whose attention masks take memory."""
        return fullest_batch(self.data.trained, rows)

    def packed(self, part: Part) -> PackedRows:
        """Return the rows of a part."""
        return self.data.trained if part == "trained" else self.data.held_out


def text_task(
    config: RunConfig, loaded: LoadedModel, tell: Tell | None = None, waits: Waits | None = None
) -> TextTask:
    """Read the data that `config` names into rows for a loaded model.

    `tell` is called with the progress; `waits` prepares the data once more where the disk of its
    cache was full. Raises BadInput where a file needs a repair, which the message names.
    """
    source = DataSource(
        request=read_request(config.data.model_dump()),
        sequence_length=config.data.row_tokens,
        held_out=config.data.held_out,
        seed=config.data.seed,
        token_cache=config.data.token_cache,
    )
    limits = ModelLimits(
        embedding_rows=loaded.embedding_rows,
        max_positions=loaded.max_positions,
        pad_id=loaded.pad_id,
        packs=loaded.packs,
    )

    def prepared() -> PreparedData:
        return prepare(source, loaded.tokenizer, limits, tell)

    data = waits(prepared) if waits else prepared()
    return TextTask(
        data=data,
        source=data.corpus.name,
        uneven=data.trained.mixes,  # the attention mask of several documents takes memory
        choices=() if config.data.path == DEMO else (read_as(data.corpus),),
        ends=tuple(end for end, _ in data.notes.ends.most_common()),
        prompt=_prompt(config.data.path, data),
        accumulation=config.train.accumulation,
        seed=config.data.seed,
        objective=CausalLM(),
    )


def counted(fit: Fit) -> SampleFit:
    """Return the counts for the plan, `inspect` and the journal."""
    return SampleFit(
        samples=fit.samples,
        longer=fit.longer,
        cut=fit.cut,
        divided=fit.divided,
        left_out=fit.left_out,
    )


def read_as(corpus: Corpus) -> ChoiceMade:
    """Say how the data is read, and why."""
    shapes = dict.fromkeys(part.shape for part in corpus.parts)
    first = corpus.parts[0]
    more = f"; and {len(corpus.parts) - 1} more files" if len(corpus.parts) > 1 else ""
    unknown = f"; {corpus.endless}" if corpus.endless else ""
    because = f"{TITLES[first.shape]}: {first.because}{more}{unknown}"
    return ChoiceMade(name="data.format", value=", ".join(shapes), because=because)


def _prompt(path: object, data: PreparedData) -> SamplePrompt:
    """Return the first words of the data, which the model should know how to continue."""
    if path == DEMO:
        return SamplePrompt(text=PROMPT, talks=False)
    first = next(iter(Reading(data.corpus)))
    if first.messages:
        words = next((m["content"] for m in first.messages if m["role"] == "user"), "")
        return SamplePrompt(text=str(words), talks=True)
    words = first.text.strip()[:PROMPT_CHARACTERS]
    return SamplePrompt(text=words.rpartition(" ")[0] or words, talks=False)


def told_of_untrained_tokens(loaded: LoadedModel, data: PackedRows) -> list[str]:
    """Warn of special tokens in the first rows whose frozen rows in embedding or head were never
    trained.

    A row counts as never trained if it is nearly zero compared with the others, or the same as
    that of another added token.
    """
    tokenizer: Any = loaded.tokenizer
    added = {id: str(token) for id, token in tokenizer.added_tokens_decoder.items()}
    used: set[int] = set()
    for number in range(min(_LOOKED_AT_ROWS, len(data))):
        rows = data[number]
        used |= set(rows.input_ids[rows.document_ids >= 0].tolist())
    model: Any = loaded.model
    modules = {"embedding": model.get_input_embeddings(), "head": model.get_output_embeddings()}
    untrained: set[int] = set()
    where: list[str] = []
    for name, module in modules.items():
        if module is not None:
            idle = _untrained_rows(module.weight, list(added))
            idle.discard(getattr(module, "padding_idx", None))  # zeros on purpose
            where += [name] if idle & used else []
            untrained |= idle
    names = [added[token] for token in sorted(untrained & used)]
    if not names:
        return []
    never = {added[token] for token in untrained}
    others = [
        name
        for name, one in NAMED.items()
        if (end := one.end or tokenizer.eos_token) in tokenizer.get_vocab()
        and not any(token == end or token in one.template for token in never)
    ]
    chosen = f"set data.chat_template to {' or '.join(others)}, " if others else ""
    return [
        f"{', '.join(names)}: {len(names)} special tokens of the data have rows in the "
        f"{' and the '.join(where)} that were never trained (zeros, or the same as other added "
        "tokens), and adapters leave these frozen: the model cannot learn to tell them apart or "
        f"to end with them; {chosen}start from a chat model, or use method.name=full"
    ]


def _untrained_rows(weight: torch.Tensor, tokens: list[int]) -> set[int]:
    """Return those of `tokens` whose rows are nearly zero or equal to another's of `tokens`."""
    known = [token for token in tokens if token < len(weight)]
    usual = weight[:: max(1, len(weight) // _COMPARED_ROWS)].float().norm(dim=1).median()
    rows = weight[known].float()
    _, same, counts = rows.unique(dim=0, return_inverse=True, return_counts=True)
    idle = (rows.norm(dim=1) <= _SMALLEST_NORM * usual) | (counts[same] > 1)
    return {token for token, is_idle in zip(known, idle.tolist(), strict=True) if is_idle}
