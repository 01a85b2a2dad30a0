"""Settings of `parallel.mode: fsdp`: how a model is sharded, and how gradients are compressed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from fluxtrain.config.section import Section
from fluxtrain.errors import BadInput, brief


def _number(value: Any) -> Any:
    """Read `1e6`, which YAML takes for text."""
    try:
        return int(float(value)) if isinstance(value, str | float) else value
    except (ValueError, OverflowError):
        return value


class FsdpSettings(Section):
    """How torch's FSDP2 shards the model over processes."""

    enabled: bool = Field(default=False, description="the same as parallel.mode=fsdp")
    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID"] = Field(
        default="FULL_SHARD",
        description="FULL_SHARD: weights are gathered for each pass of a block; SHARD_GRAD_OP: "
        "they stay whole from forward to backward; NO_SHARD: every rank holds all, as in DDP; "
        "HYBRID: sharded over the ranks of a machine, replicated between machines",
    )
    cpu_offload: bool = Field(
        default=False,
        description="shards of weights, gradients and states live in host memory, and AdamW runs "
        "there",
    )
    mixed_precision: bool = Field(
        default=True,
        description="compute in model.dtype, with fp32 masters and fp32 sums of gradients; false "
        "computes in fp32",
    )
    activation_checkpointing: bool = Field(
        default=True, description="compute each block again in the backward pass"
    )
    backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST"] = Field(
        default="BACKWARD_PRE",
        description="gather the next block's weights before the gradients of this one, or after "
        "them: less memory, less overlap",
    )
    forward_prefetch: bool = Field(
        default=True, description="queue the next block's gather before this block computes"
    )
    limit_all_gathers: bool = Field(
        default=True, description="no effect: FSDP2 always frees gathered weights in time"
    )
    use_orig_params: bool = Field(
        default=True, description="no effect: FSDP2 always keeps the model's own parameters"
    )
    sync_module_states: bool = Field(
        default=True,
        description="send the weights of rank 0 to all before training; false trusts that every "
        "rank has read the same files",
    )
    min_num_params: Annotated[int, Field(ge=0), BeforeValidator(_number)] = Field(
        default=0,
        description="a block with fewer parameters is gathered with what stands outside of blocks",
    )

    def without_effect(self) -> list[str]:
        """Say of each setting that changes nothing why, a sentence each."""
        told = []
        if not self.limit_all_gathers:
            told.append(
                "fsdp.limit_all_gathers=false has no effect: FSDP2 frees gathered weights in the "
                "order of its streams, without waits that could be left out"
            )
        if not self.use_orig_params:
            told.append(
                "fsdp.use_orig_params=false has no effect: FSDP2 shards each parameter by itself "
                "and has no flat ones"
            )
        return told


class CommSettings(Section):
    """How gradients are compressed between ranks (`parallel.mode: fsdp`)."""

    compress: str = Field(
        default="none",
        min_length=1,
        description="none, auto (where it is measured to be faster), fp16, bf16, int8, int8_sum, "
        "fp8, qsgd, nc, onebit, signsgd, topk, randomk, thresholdv, sketch, gradiveq, powersgd or "
        "hybrid; docs/communication.md says what each sends and loses",
    )
    config: dict[str, Any] = Field(
        default={},
        description="options of the method, such as {block: 128}; error_feedback: true adds what a "
        "step loses to the next one's gradient",
    )
    gather: Literal["none", "int8", "fp8"] = Field(
        default="none", description="weights are gathered in 8 bits, which every rank computes with"
    )
    profile_steps: int = Field(
        default=0,
        ge=0,
        le=1000,
        description="so many steps are profiled, as with --profile: traces for TensorBoard and "
        "Perfetto in the run folder, and a table of what communication took",
    )


def options_of(options: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """Return options of a method, which may be JSON. Raises BadInput for what is no object."""
    if isinstance(options, str) and options:
        try:
            options = json.loads(options)
        except (json.JSONDecodeError, RecursionError) as error:
            raise BadInput(
                f"comm.config is no JSON ({error} in {brief(str(options), 60)}): write an object, "
                "as in '{\"block\": 128}'"
            ) from None
    if options and not isinstance(options, Mapping):
        shown = brief(json.dumps(options), 60)
        raise BadInput(f"comm.config is {shown}: write an object, as in '{{\"block\": 128}}'")
    return dict(options or {})
