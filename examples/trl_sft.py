"""LoRA with TRL's SFTTrainer on a streamed model: python examples/trl_sft.py MODEL OUT

MODEL is a folder or a hub id, OUT the folder for the adapter. Needs `pip install trl`. With
`--frozen nf4-double` the base is packed in 4 bits (QLoRA); then say so to
`fluxtrain export OUT --merge --packed nf4-double`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import fluxtrain

DATA = Path(__file__).parent / "messages.jsonl"


def main() -> None:
    """Train an adapter and save it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("out")
    parser.add_argument("--frozen", default="plain", help="or nf4, nf4-double, int8")
    parser.add_argument("--device", default=None, help="cpu or cuda")
    parser.add_argument("--steps", type=int, default=20)
    asked = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype="auto")
    adapters = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, adapters)
    fluxtrain.wrap(model, device=asked.device, frozen=asked.frozen)  # adapters first
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=asked.out,
            max_steps=asked.steps,
            logging_steps=5,
            learning_rate=1e-3,
            per_device_train_batch_size=2,
            max_length=128,
            save_strategy="no",
            report_to="none",
            use_cpu=asked.device == "cpu",
        ),
        train_dataset=load_dataset("json", data_files=str(DATA), split="train"),
        processing_class=AutoTokenizer.from_pretrained(asked.model),
    )
    trainer.train()
    trainer.save_model(asked.out)


if __name__ == "__main__":
    main()
